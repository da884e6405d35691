// MLPs prepared for many calls: one gate, its selection, all products and the activation are one call.
#include "bind/groups.h"
#include "host/paired.h"

#include <torch/csrc/stable/library.h>

#include <memory>

namespace blockgate {
namespace {

Tensor run_prepared_mlp(const Tensor& x, int64_t up, int64_t down, Integers gate_proj,
                        int64_t open_blocks, const std::string& activation) {
  const std::shared_ptr<const PreparedLayer> first = find_prepared(up), last = find_prepared(down);
  const std::shared_ptr<const PreparedLayer> other =
      gate_proj.size() == 0 ? nullptr : find_prepared(gate_proj[0]);
  const PairedLayers layers{*first, *last, other.get(), activation_of(activation)};
  check_paired(layers);
  const Rows<float> rows = rows_of<float>(x, "x");
  check_size(x, "x", 1, first->grid.in);
  const Tensor y = empty_tensor({rows.count, last->grid.out}, ScalarType::Float);
  run_paired(layers, rows.data, rows.stride, rows.count, open_blocks, data_of<float>(y));
  return y;
}

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("run_prepared_mlp", TORCH_BOX(&blockgate::run_prepared_mlp));
}
