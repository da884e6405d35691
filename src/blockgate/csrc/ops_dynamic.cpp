// dynamic_linear: gate, top-k and block product in one op, for inference.
#include "packed.h"
#include "select.h"

#include <torch/csrc/stable/library.h>

namespace blockgate {
namespace {

// A packed fp32 linear layer with one column of blocks, as pack_blocks makes it.
struct GateLayer {
  Grid grid;
  PackedWeight weight;
  Dense<float> bias;
};

GateLayer gate_layer_of(const Tensor& weight, const std::optional<Tensor>& bias, const char* name,
                        int64_t outputs, int64_t inputs) {
  check_tensor(weight, name, ScalarType::Float, 4);
  // With several blocks each holds whole panels, so the block height can be read off the shape.
  const int64_t block_out = weight.size(0) == 1 ? outputs : weight.size(1) * PANEL;
  const Grid grid = make_grid(outputs, inputs, block_out, inputs);
  return {grid, packed_weight_of(weight, weight, grid), bias_of<float>(bias, name, outputs, weight)};
}

void run_gate_layer(const GateLayer& layer, const float* x, int64_t stride, int64_t tokens,
                    float* y) {
  run_packed_dense(layer.weight, layer.grid, x, stride, tokens, layer.bias.data, y);
}

Tensor dynamic_linear(const Tensor& x, const Tensor& blocks, const Tensor& scale,
                      const std::optional<Tensor>& bias, const Tensor& gate_weight,
                      const std::optional<Tensor>& gate_bias,
                      const std::optional<Tensor>& hidden_weight,
                      const std::optional<Tensor>& hidden_bias, int64_t key_offset,
                      int64_t key_size, int64_t num_blocks, int64_t hidden_size,
                      int64_t out_features, int64_t block_out, int64_t block_in,
                      int64_t open_blocks, int64_t groups, const std::string& normalise) {
  const Rows<float> rows = rows_of<float>(x, "x");
  const Grid grid = make_grid(out_features, rows.width, block_out, block_in);
  STD_TORCH_CHECK(num_blocks == grid.rows * grid.cols, "num_blocks: expected ",
                  grid.rows * grid.cols, " (", grid.rows, " x ", grid.cols, "), got ", num_blocks);
  STD_TORCH_CHECK(key_offset >= 0 && key_size > 0 && key_offset + key_size <= rows.width,
                  "key: expected a part of the ", rows.width, " input features, got [", key_offset,
                  ", ", key_offset + key_size, ")");
  const PackedWeight packed = packed_weight_of(blocks, scale, grid);
  const Dense<float> b = bias_of<float>(bias, "bias", grid.out, blocks);
  const GateLayer gate = gate_layer_of(gate_weight, gate_bias, "gate_weight or gate_bias",
                                       num_blocks, hidden_weight ? hidden_size : key_size);
  const TopK spec = top_k_spec(num_blocks, open_blocks, groups, normalise);
  const int64_t tokens = rows.count, kept = groups * open_blocks;
  const Tensor y = empty_tensor({tokens, grid.out}, ScalarType::Float);
  if (tokens == 0) return y;

  const float* key = rows.data + key_offset;
  int64_t key_stride = rows.stride;
  Buffer<float> hidden;
  if (hidden_weight) {
    const GateLayer layer = gate_layer_of(*hidden_weight, hidden_bias,
                                          "hidden_weight or hidden_bias", hidden_size, key_size);
    hidden = Buffer<float>(tokens * hidden_size);
    run_gate_layer(layer, key, key_stride, tokens, hidden.get());
    for (int64_t i = 0; i < tokens * hidden_size; ++i) hidden[i] = hidden[i] <= 0 ? 0 : hidden[i];
    key = hidden.get();
    key_stride = hidden_size;
  }
  Buffer<float> scores(tokens * num_blocks);
  run_gate_layer(gate, key, key_stride, tokens, scores.get());
  Buffer<float> gates(tokens * kept);
  Buffer<int64_t> indices(tokens * kept);
  run_top_k<float>(spec, scores.get(), num_blocks, tokens, gates.get(), indices.get());
  run_packed(packed, grid, rows.data, rows.stride, tokens, b.data, gates.get(), indices.get(), kept,
             data_of<float>(y));
  return y;
}

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("dynamic_linear", TORCH_BOX(&blockgate::dynamic_linear));
}
