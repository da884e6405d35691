#include "host/paired.h"

#include "host/bad_rows.h"
#include "host/dispatch.h"

#include <algorithm>
#include <cstring>

namespace blockgate {
namespace {

// Channels of open blocks: activated, times those of `factor` unless it is null. All others become 0.
void activate(const Grid& grid, Activation kind, const float* gates, const int64_t* indices, int64_t slots,
              uint8_t* is_open, const float* factor, float* hidden) {
  std::fill_n(is_open, grid.rows, uint8_t(0));
  for (int64_t s = 0; s < slots; ++s)
    if (gates[s] != 0) is_open[indices[s]] = 1;
  for (int64_t row = 0; row < grid.rows; ++row) {
    const int64_t begin = row * grid.block_out, count = outputs_of_row(grid, row);
    if (is_open[row]) kernels().activate(kind, factor ? factor + begin : nullptr, count, hidden + begin);
    else std::memset(hidden + begin, 0, count * sizeof(float));
  }
}

void run_by(Regime regime, const PairedLayers& layers, const float* x, int64_t stride,
            int64_t tokens, int64_t open_blocks, float* y) {
  const Grid& grid = layers.up.grid;
  const OpenGates open = gates_of(layers.up, x, stride, tokens, open_blocks);
  const float* gates = open.values.get();
  const int64_t* indices = open.indices.get();
  const int64_t entries = tokens * open.slots;
  // Hidden channels are computed whole: the gate counts once, on their way down.
  Buffer<float> opened(entries);
  for (int64_t i = 0; i < entries; ++i) opened[i] = gates[i] != 0;
  Buffer<float> hidden(tokens * grid.out), factor(layers.gate_proj ? tokens * grid.out : 1);
  const auto product = [&](const PreparedLayer& layer, float* result) {
    run_packed(layer.weight, grid, x, stride, tokens, layer.bias.data(), opened.get(), indices,
               open.slots, result, regime);
  };
  product(layers.gate_proj ? *layers.gate_proj : layers.up, hidden.get());
  if (layers.gate_proj) product(layers.up, factor.get());
  Buffer<uint8_t> is_open(tokens * grid.rows);
  // About 10 multiply-adds for each activation.
  run_tasks(tokens, threads_for(tokens * grid.out * 10), [&](int64_t t) {
    activate(grid, layers.activation, gates + t * open.slots, indices + t * open.slots, open.slots,
             is_open.get() + t * grid.rows, layers.gate_proj ? factor.get() + t * grid.out : nullptr,
             hidden.get() + t * grid.out);
  });
  const Grid& down = layers.down.grid;
  run_packed(layers.down.weight, down, hidden.get(), grid.out, tokens, layers.down.bias.data(),
             gates, indices, open.slots, y, regime);
  spoil_bad_rows(x, stride, tokens, grid.in, y, down.out);
}

}  // namespace

Activation activation_of(const std::string& name) {
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "relu") return Activation::relu;
  STD_TORCH_CHECK(name == "silu", "activation: expected gelu, gelu_tanh, relu or silu, got ", name);
  return Activation::silu;
}

void check_paired(const PairedLayers& layers) {
  const Grid &up = layers.up.grid, &down = layers.down.grid;
  STD_TORCH_CHECK(layers.up.gate && up.cols == 1, "up: expected a gate and one column of blocks, got ",
                  up.cols, layers.up.gate ? " columns" : " columns and no gate");
  STD_TORCH_CHECK(!layers.down.gate && down.rows == 1 && down.in == up.out && down.block_in == up.block_out,
                  "down: expected one row of blocks of ", up.block_out, " out of ", up.out, " inputs, got ",
                  down.rows, " rows of blocks of ", down.block_in, " out of ", down.in);
  if (!layers.gate_proj) return;
  const Grid& other = layers.gate_proj->grid;
  STD_TORCH_CHECK(!layers.gate_proj->gate && other.out == up.out && other.in == up.in &&
                      other.block_out == up.block_out && other.block_in == up.block_in,
                  "gate_proj: expected the grid of up, got blocks of ", other.block_out, " x ",
                  other.block_in, " in ", other.out, " x ", other.in);
}

void run_paired(const PairedLayers& layers, const float* x, int64_t stride, int64_t tokens,
                int64_t open_blocks, float* y) {
  if (tokens == 0) return;
  const Grid& grid = layers.up.grid;
  const int64_t most = 2 * int64_t(std::bit_floor(uint64_t(tokens))) - 1;
  const int64_t matrices = layers.gate_proj ? 3 : 2;
  const bool many = threads_for(most * open_blocks * packed_block_size(grid) * matrices) > 1;
  Choice::Ways ways;
  for (const Regime regime : {Regime::grouped, Regime::streamed}) {
    if (regime == Regime::streamed && most == 1) break;
    if (many) ways.add({thread_count(), int(regime)});
    ways.add({1, int(regime)});
  }
  const auto run = [&](Choice::Way way) {
    const ThreadLimit limit(way.threads);
    run_by(Regime(way.kind), layers, x, stride, tokens, open_blocks, y);
  };
  if (ways.count == 1) return run(ways.of[0]);
  layers.up.choices->layer[tokens].run(ways, double(tokens), run);
}

}  // namespace blockgate
