// topk_gates and its backward.
#include "bind/groups.h"
#include "host/select.h"
#include "host/tensors.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>

namespace blockgate {
namespace {

std::tuple<Tensor, Tensor> topk_gates(const Tensor& scores, Integers selection,
                                      const std::string& normalise) {
  const Selection chosen = selection_of(selection);
  return with_float_type(scores, "scores", [&](auto zero) -> std::tuple<Tensor, Tensor> {
    using T = decltype(zero);
    const Rows<T> rows = rows_of<T>(scores, "scores");
    const TopK spec = top_k_spec(rows.width, chosen.open_blocks, chosen.groups, normalise_of(normalise));
    const int64_t kept = chosen.groups * chosen.open_blocks;
    const Tensor gates = empty_tensor({rows.count, kept}, SCALAR_TYPE<T>);
    const Tensor indices = empty_tensor({rows.count, kept}, ScalarType::Long);
    run_top_k<T>(spec, rows.data, rows.stride, rows.count, data_of<T>(gates),
                 data_of<int64_t>(indices));
    return {gates, indices};
  });
}

Tensor topk_gates_backward(const Tensor& grad_gates, const Tensor& scores, const Tensor& gates,
                           const Tensor& indices, Integers selection,
                           const std::string& normalise) {
  const Selection chosen = selection_of(selection);
  return with_float_type(scores, "scores", [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> rows = rows_of<T>(scores, "scores");
    const Dense<T> grad = dense_of<T>(grad_gates, "grad_gates", 2);
    const Dense<T> gate = dense_of<T>(gates, "gates", 2);
    const Dense<int64_t> index = dense_of<int64_t>(indices, "indices", 2);
    const TopK spec = top_k_spec(rows.width, chosen.open_blocks, chosen.groups, normalise_of(normalise));
    const int64_t kept = spec.groups * spec.open_blocks;
    for (const auto& [t, name] : {std::pair{&grad_gates, "grad_gates"}, {&gates, "gates"},
                                  {&indices, "indices"}}) {
      check_size(*t, name, 0, rows.count);
      check_size(*t, name, 1, kept);
    }
    const Tensor result = empty_tensor({rows.count, rows.width}, SCALAR_TYPE<T>);
    T* out = data_of<T>(result);
    const auto& kernel = typed_kernels<T>();
    const int64_t parts = row_parts(rows.count, rows.width);
    std::atomic<int64_t> bad{-1};
    run_tasks(parts, parts, [&](int64_t part) {
      const Buffer<int64_t> runners(spec.groups);
      const Buffer<T> scratch(top_k_scratch(spec));
      for (int64_t t = rows.count * part / parts; t < rows.count * (part + 1) / parts; ++t) {
        for (int64_t i = t * kept; i < (t + 1) * kept; ++i)
          if (uint64_t(index.data[i]) >= uint64_t(rows.width)) {
            bad.store(i, std::memory_order_relaxed);
            return;
          }
        kernel.top_k_backward(spec, grad.data + t * kept, rows.data + t * rows.stride,
                              gate.data + t * kept, index.data + t * kept, out + t * rows.width,
                              runners.get(), scratch.get());
      }
    });
    STD_TORCH_CHECK(bad < 0, "indices: expected block indices in [0, ", rows.width, "), got ",
                    index.data[bad]);
    return result;
  });
}

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("topk_gates", TORCH_BOX(&blockgate::topk_gates));
  m.impl("topk_gates_backward", TORCH_BOX(&blockgate::topk_gates_backward));
}
