// gate_scores: the gate's linear layer.
#include "host/product.h"
#include "host/tensors.h"

#include <torch/csrc/stable/library.h>

namespace blockgate {
namespace {

// key @ weight.T + bias as one block over the whole key: acc over k ascending, then + bias.
Tensor gate_scores(const Tensor& key, const Tensor& weight, const std::optional<Tensor>& bias) {
  return with_float_type(key, "key", [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> rows = rows_of<T>(key, "key");
    const Dense<T> w = dense_of<T>(weight, "weight", 2);
    check_size(weight, "weight", 1, rows.width);
    const Grid grid = make_grid(weight.size(0), rows.width, weight.size(0), rows.width);
    const Dense<T> b = bias_of<T>(bias, "bias", grid.out, weight);
    const Tensor scores = empty_tensor({rows.count, grid.out}, SCALAR_TYPE<T>);
    if (rows.count > 0)
      run_forward<T>({.grid = grid,
                      .x = {rows.data, grid.in, rows.stride},
                      .row_major = w.data,
                      .packed = {},
                      .bias = b.data,
                      .y = data_of<T>(scores),
                      .groups = {nullptr, nullptr}},
                     rows.count, rows.count);
    return scores;
  });
}

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("gate_scores", TORCH_BOX(&blockgate::gate_scores));
}
