// dynamic_linear: gate, top-k and block product in one op, for inference.
#include "packed.h"
#include "select.h"

#include <torch/csrc/stable/library.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

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

// Everything of a gated layer but its input and the number of open blocks, checked once.
struct DynamicLayer {
  Grid grid;
  PackedWeight weight;
  Dense<float> bias;
  GateLayer gate;
  std::optional<GateLayer> hidden;
  int64_t key_offset, key_size, groups;
  std::string normalise;
};

DynamicLayer layer_of(const Tensor& blocks, const Tensor& scale, const std::optional<Tensor>& bias,
                      const Tensor& gate_weight, const std::optional<Tensor>& gate_bias,
                      const std::optional<Tensor>& hidden_weight,
                      const std::optional<Tensor>& hidden_bias, int64_t key_offset,
                      int64_t key_size, int64_t num_blocks, int64_t hidden_size,
                      int64_t in_features, int64_t out_features, int64_t block_out,
                      int64_t block_in, int64_t groups, const std::string& normalise) {
  const Grid grid = make_grid(out_features, in_features, block_out, block_in);
  STD_TORCH_CHECK(num_blocks == grid.rows * grid.cols, "num_blocks: expected ",
                  grid.rows * grid.cols, " (", grid.rows, " x ", grid.cols, "), got ", num_blocks);
  STD_TORCH_CHECK(key_offset >= 0 && key_size > 0 && key_offset + key_size <= in_features,
                  "key: expected a part of the ", in_features, " input features, got [", key_offset,
                  ", ", key_offset + key_size, ")");
  std::optional<GateLayer> hidden;
  if (hidden_weight)
    hidden = gate_layer_of(*hidden_weight, hidden_bias, "hidden_weight or hidden_bias", hidden_size,
                           key_size);
  return {grid,
          packed_weight_of(blocks, scale, grid),
          bias_of<float>(bias, "bias", grid.out, blocks),
          gate_layer_of(gate_weight, gate_bias, "gate_weight or gate_bias", num_blocks,
                        hidden_weight ? hidden_size : key_size),
          hidden,
          key_offset,
          key_size,
          groups,
          normalise};
}

Tensor run_layer(const DynamicLayer& layer, const Tensor& x, int64_t open_blocks) {
  const Rows<float> rows = rows_of<float>(x, "x");
  const Grid& grid = layer.grid;
  check_size(x, "x", 1, grid.in);
  const int64_t num_blocks = grid.rows * grid.cols;
  const TopK spec = top_k_spec(num_blocks, open_blocks, layer.groups, layer.normalise);
  const int64_t tokens = rows.count, kept = layer.groups * open_blocks;
  const Tensor y = empty_tensor({tokens, grid.out}, ScalarType::Float);
  if (tokens == 0) return y;

  const float* key = rows.data + layer.key_offset;
  int64_t key_stride = rows.stride;
  Buffer<float> hidden;
  if (layer.hidden) {
    const int64_t width = layer.hidden->grid.out;
    hidden = Buffer<float>(tokens * width);
    run_gate_layer(*layer.hidden, key, key_stride, tokens, hidden.get());
    for (int64_t i = 0; i < tokens * width; ++i) hidden[i] = hidden[i] <= 0 ? 0 : hidden[i];
    key = hidden.get();
    key_stride = width;
  }
  Buffer<float> scores(tokens * num_blocks);
  run_gate_layer(layer.gate, key, key_stride, tokens, scores.get());
  Buffer<float> gates(tokens * kept);
  Buffer<int64_t> indices(tokens * kept);
  run_top_k<float>(spec, scores.get(), num_blocks, tokens, gates.get(), indices.get());
  run_packed(layer.weight, grid, rows.data, rows.stride, tokens, layer.bias.data, gates.get(),
             indices.get(), kept, data_of<float>(y));
  return y;
}

Tensor dynamic_linear(const Tensor& x, const Tensor& blocks, const Tensor& scale,
                      const std::optional<Tensor>& bias, const Tensor& gate_weight,
                      const std::optional<Tensor>& gate_bias,
                      const std::optional<Tensor>& hidden_weight,
                      const std::optional<Tensor>& hidden_bias, int64_t key_offset,
                      int64_t key_size, int64_t num_blocks, int64_t hidden_size,
                      int64_t out_features, int64_t block_out, int64_t block_in,
                      int64_t open_blocks, int64_t groups, const std::string& normalise) {
  check_tensor(x, "x", ScalarType::Float, 2);
  return run_layer(layer_of(blocks, scale, bias, gate_weight, gate_bias, hidden_weight, hidden_bias,
                            key_offset, key_size, num_blocks, hidden_size, x.size(1), out_features,
                            block_out, block_in, groups, normalise),
                   x, open_blocks);
}

// Layers that were prepared, by number: passing and checking eighteen arguments takes longer than
// computing a small layer. Never destroyed, since Python may release layers until the very end.
struct PreparedLayers {
  std::shared_mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<const DynamicLayer>> layers;
  int64_t next = 1;
};

PreparedLayers& prepared() {
  static PreparedLayers* const layers = new PreparedLayers;
  return *layers;
}

int64_t prepare_dynamic_linear(const Tensor& blocks, const Tensor& scale,
                               const std::optional<Tensor>& bias, const Tensor& gate_weight,
                               const std::optional<Tensor>& gate_bias,
                               const std::optional<Tensor>& hidden_weight,
                               const std::optional<Tensor>& hidden_bias, int64_t key_offset,
                               int64_t key_size, int64_t num_blocks, int64_t hidden_size,
                               int64_t in_features, int64_t out_features, int64_t block_out,
                               int64_t block_in, int64_t groups, const std::string& normalise) {
  auto layer = std::make_shared<const DynamicLayer>(
      layer_of(blocks, scale, bias, gate_weight, gate_bias, hidden_weight, hidden_bias, key_offset,
               key_size, num_blocks, hidden_size, in_features, out_features, block_out, block_in,
               groups, normalise));
  PreparedLayers& table = prepared();
  const std::unique_lock lock(table.mutex);
  table.layers.emplace(table.next, std::move(layer));
  return table.next++;
}

Tensor run_prepared_linear(const Tensor& x, int64_t handle, int64_t open_blocks) {
  std::shared_ptr<const DynamicLayer> layer;
  {
    PreparedLayers& table = prepared();
    const std::shared_lock lock(table.mutex);
    const auto found = table.layers.find(handle);
    STD_TORCH_CHECK(found != table.layers.end(), "handle: expected a prepared layer, got ", handle);
    layer = found->second;
  }
  return run_layer(*layer, x, open_blocks);
}

void release_prepared_linear(int64_t handle) {
  std::shared_ptr<const DynamicLayer> last;  // freed after the lock
  PreparedLayers& table = prepared();
  const std::unique_lock lock(table.mutex);
  const auto found = table.layers.find(handle);
  if (found == table.layers.end()) return;
  last = std::move(found->second);
  table.layers.erase(found);
}

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("dynamic_linear", TORCH_BOX(&blockgate::dynamic_linear));
  m.impl("prepare_dynamic_linear", TORCH_BOX(&blockgate::prepare_dynamic_linear));
  m.impl("run_prepared_linear", TORCH_BOX(&blockgate::run_prepared_linear));
}

STABLE_TORCH_LIBRARY_IMPL(blockgate, CompositeExplicitAutograd, m) {
  m.impl("release_prepared_linear", TORCH_BOX(&blockgate::release_prepared_linear));
}
