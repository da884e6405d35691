// dynamic_linear: gate, top-k and block product in one op, for inference; and prepared layers.
#include "host/prepared.h"

#include <torch/csrc/stable/library.h>

namespace blockgate {
namespace {

PreparedLayer layer_of(const Tensor& blocks, const Tensor& scale, const std::optional<Tensor>& bias,
                       const Tensor& gate_weight, const std::optional<Tensor>& gate_bias,
                       const std::optional<Tensor>& hidden_weight,
                       const std::optional<Tensor>& hidden_bias, int64_t key_offset,
                       int64_t key_size, int64_t num_blocks, int64_t hidden_size,
                       int64_t in_features, int64_t out_features, int64_t block_out,
                       int64_t block_in, int64_t groups, const std::string& normalise) {
  PreparedLayer layer =
      prepare_dense(blocks, scale, bias, in_features, out_features, block_out, block_in);
  layer.gate = prepare_gate(layer.grid, gate_weight, gate_bias, hidden_weight, hidden_bias,
                            key_offset, key_size, num_blocks, hidden_size, groups, normalise);
  return layer;
}

Tensor run_on(const PreparedLayer& layer, const Tensor& x, int64_t open_blocks) {
  const Rows<float> rows = rows_of<float>(x, "x");
  check_size(x, "x", 1, layer.grid.in);
  const Tensor y = empty_tensor({rows.count, layer.grid.out}, ScalarType::Float);
  run_layer(layer, rows.data, rows.stride, rows.count, open_blocks, data_of<float>(y));
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
  return run_on(layer_of(blocks, scale, bias, gate_weight, gate_bias, hidden_weight, hidden_bias,
                         key_offset, key_size, num_blocks, hidden_size, x.size(1), out_features,
                         block_out, block_in, groups, normalise),
                x, open_blocks);
}

int64_t prepare_dynamic_linear(const Tensor& blocks, const Tensor& scale,
                               const std::optional<Tensor>& bias, const Tensor& gate_weight,
                               const std::optional<Tensor>& gate_bias,
                               const std::optional<Tensor>& hidden_weight,
                               const std::optional<Tensor>& hidden_bias, int64_t key_offset,
                               int64_t key_size, int64_t num_blocks, int64_t hidden_size,
                               int64_t in_features, int64_t out_features, int64_t block_out,
                               int64_t block_in, int64_t groups, const std::string& normalise) {
  return add_prepared(layer_of(blocks, scale, bias, gate_weight, gate_bias, hidden_weight,
                               hidden_bias, key_offset, key_size, num_blocks, hidden_size,
                               in_features, out_features, block_out, block_in, groups, normalise));
}

int64_t prepare_packed_linear(const Tensor& blocks, const Tensor& scale,
                              const std::optional<Tensor>& bias, int64_t in_features,
                              int64_t out_features, int64_t block_out, int64_t block_in) {
  return add_prepared(
      prepare_dense(blocks, scale, bias, in_features, out_features, block_out, block_in));
}

Tensor run_prepared_linear(const Tensor& x, int64_t handle, int64_t open_blocks) {
  return run_on(*find_prepared(handle), x, open_blocks);
}

void release_prepared_linear(int64_t handle) { remove_prepared(handle); }

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("dynamic_linear", TORCH_BOX(&blockgate::dynamic_linear));
  m.impl("prepare_dynamic_linear", TORCH_BOX(&blockgate::prepare_dynamic_linear));
  m.impl("prepare_packed_linear", TORCH_BOX(&blockgate::prepare_packed_linear));
  m.impl("run_prepared_linear", TORCH_BOX(&blockgate::run_prepared_linear));
}

STABLE_TORCH_LIBRARY_IMPL(blockgate, CompositeExplicitAutograd, m) {
  m.impl("release_prepared_linear", TORCH_BOX(&blockgate::release_prepared_linear));
}
