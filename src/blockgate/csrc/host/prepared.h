// Packed layers that were prepared for many calls: checked once, then named by a number.
#pragma once

#include "host/packed.h"

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

// Everything of a layer but its input and the number of open blocks. Without a gate all are open.
struct PreparedLayer {
  Grid grid;
  PackedWeight weight;
  KeptBias bias;
  std::optional<PreparedGate> gate;
};

// Rows of x, `stride` apart, to y (tokens, out); open_blocks counts only where there is a gate.
void run_layer(const PreparedLayer& layer, const float* x, int64_t stride, int64_t tokens,
               int64_t open_blocks, float* y);

int64_t add_prepared(PreparedLayer layer);
std::shared_ptr<const PreparedLayer> find_prepared(int64_t handle);
void remove_prepared(int64_t handle);

}  // namespace blockgate
