// Packed layers that were prepared for many calls: checked once, then named by a number.
#pragma once

#include "host/choice.h"
#include "host/packed.h"

#include <atomic>
#include <bit>
#include <memory>
#include <optional>
#include <string>

namespace blockgate __attribute__((visibility("hidden"))) {

// A packed fp32 linear layer with one column of blocks, as pack_blocks makes it.
struct GateLayer {
  Grid grid;
  PackedWeight weight;
  KeptBias bias;
};

struct PreparedGate {
  GateLayer scores;
  std::optional<GateLayer> hidden;
  int64_t key_offset, groups;
  Normalise normalise;
};

// How calls of one kind run, by how many tokens they have: 1, 2 and 3, 4 to 7, and so on.
class ChoicesByTokens {
 public:
  Choice& operator[](int64_t tokens) {
    return choices_[std::min<size_t>(std::bit_width(uint64_t(tokens)), choices_.size()) - 1];
  }

 private:
  std::array<Choice, 12> choices_;
};

struct Choices {
  // The layer by itself; as the recurrent product of an LSTM or GRU layer, over many steps; as the first of
  // a whole stack, in a single step; as an output layer that is asked for the likeliest words.
  ChoicesByTokens layer, steps, stack, likeliest;
  // Rows that the last of these has seen, and the groups of rarer words that were computed for them.
  std::atomic<int64_t> likeliest_rows{0}, likeliest_groups{0};
};

// Everything of a layer but its input and the number of open blocks. Without a gate all are open.
struct PreparedLayer {
  Grid grid;
  PackedWeight weight;
  KeptBias bias;
  std::optional<PreparedGate> gate;
  std::unique_ptr<Choices> choices = std::make_unique<Choices>();
};

// Rows of x, `stride` apart, to y (tokens, out); open_blocks counts only where there is a gate.
void run_layer(const PreparedLayer& layer, const float* x, int64_t stride, int64_t tokens,
               int64_t open_blocks, float* y);

// The gates of some tokens: for each `slots` values, 0 where closed, and their blocks.
struct OpenGates {
  int64_t slots;
  Buffer<float> values{};
  Buffer<int64_t> indices{};
};

// What the gate of a layer, which has one, decides for rows of x.
OpenGates gates_of(const PreparedLayer& layer, const float* x, int64_t stride, int64_t tokens,
                   int64_t open_blocks);

int64_t add_prepared(PreparedLayer layer);
std::shared_ptr<const PreparedLayer> find_prepared(int64_t handle);
void remove_prepared(int64_t handle);

}  // namespace blockgate
