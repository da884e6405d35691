// gated_linear on row-major weights (training) and its backward.
#include "bind/groups.h"
#include "host/bad_rows.h"
#include "host/product.h"
#include "host/tensors.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>

namespace blockgate {
namespace {

Tensor gated_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                    const Tensor& gates, const Tensor& indices, Integers block) {
  const BlockSize size = block_of(block);
  return with_float_type(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> rows = rows_of<T>(x, "x");
    const Dense<T> w = dense_of<T>(weight, "weight", 2);
    check_size(weight, "weight", 1, rows.width);
    const Grid grid = make_grid(weight.size(0), rows.width, size.out, size.in);
    const Dense<T> b = bias_of<T>(bias, "bias", grid.out, weight);
    const Gates<T> gate = gates_of<T>(gates, indices, rows.count);
    const Tensor y = empty_tensor({rows.count, grid.out}, SCALAR_TYPE<T>);
    if (rows.count == 0) return y;
    const GroupedGates<T> groups = group_by_block<T>(
        gate.gates.data, gate.indices.data, rows.count, gate.slots, grid.rows * grid.cols);
    const BlockRowsCopy<T> blocked =
        block_rows(rows.data, rows.stride, rows.count, grid.in, grid.block_in);
    run_forward<T>({.grid = grid,
                    .x = blocked.view,
                    .row_major = w.data,
                    .packed = {},
                    .bias = b.data,
                    .y = data_of<T>(y),
                    .groups = groups.view()},
                   rows.count, groups.starts[grid.rows * grid.cols]);
    spoil_bad_rows(rows.data, rows.stride, rows.count, rows.width, data_of<T>(y), grid.out);
    return y;
  });
}

std::tuple<Tensor, Tensor, Tensor> gated_linear_backward(
    const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& gates,
    const Tensor& indices, Integers block, bool need_x, bool need_weight, bool need_gates) {
  const BlockSize size = block_of(block);
  return with_float_type(x, "x", [&](auto zero) -> std::tuple<Tensor, Tensor, Tensor> {
    using T = decltype(zero);
    const Rows<T> rows = rows_of<T>(x, "x");
    const Dense<T> w = dense_of<T>(weight, "weight", 2);
    check_size(weight, "weight", 1, rows.width);
    const Grid grid = make_grid(weight.size(0), rows.width, size.out, size.in);
    const Rows<T> grad = rows_of<T>(grad_y, "grad_y");
    check_size(grad_y, "grad_y", 0, rows.count);
    check_size(grad_y, "grad_y", 1, grid.out);
    const Gates<T> gate = gates_of<T>(gates, indices, rows.count);

    const auto result = [&](bool needed, int64_t height, int64_t width) {
      return needed ? empty_tensor({height, width}, SCALAR_TYPE<T>)
                    : empty_tensor({int64_t(0)}, SCALAR_TYPE<T>);
    };
    const Tensor grad_x = result(need_x, rows.count, grid.in);
    const Tensor grad_weight = result(need_weight, grid.out, grid.in);
    const Tensor grad_gates = result(need_gates, rows.count, gate.slots);
    if (need_gates && rows.count * gate.slots > 0)
      std::memset(data_of<T>(grad_gates), 0, rows.count * gate.slots * sizeof(T));

    const GroupedGates<T> groups = group_by_block<T>(
        gate.gates.data, gate.indices.data, rows.count, gate.slots, grid.rows * grid.cols);
    const int64_t open = groups.starts[grid.rows * grid.cols];
    const BlockRowsCopy<T> blocked_x =
        block_rows(rows.data, rows.stride, rows.count, grid.in, grid.block_in);
    const BlockRowsCopy<T> blocked_grad =
        block_rows(grad.data, grad.stride, rows.count, grid.out, grid.block_out);
    const BackwardArgs<T> args{grid,
                               blocked_grad.view,
                               blocked_x.view,
                               w.data,
                               need_x ? data_of<T>(grad_x) : nullptr,
                               need_gates ? data_of<T>(grad_gates) : nullptr,
                               need_weight ? data_of<T>(grad_weight) : nullptr,
                               gate.slots,
                               groups.view()};
    if (rows.count > 0 && (need_x || need_gates)) run_input_grad<T>(args, rows.count, open);
    if (need_weight) run_weight_grad<T>(args, open);
    return {grad_x, grad_weight, grad_gates};
  });
}

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("gated_linear", TORCH_BOX(&blockgate::gated_linear));
  m.impl("gated_linear_backward", TORCH_BOX(&blockgate::gated_linear_backward));
}
