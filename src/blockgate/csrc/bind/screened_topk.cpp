// screened_topk and screened_rank, and layers prepared for many of them.
#include "host/handles.h"
#include "host/packed.h"
#include "host/screen.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

namespace blockgate {
namespace {

HandleTable<ScreenedLayer>& table() {
  // Never destroyed, since Python may release layers until the very end.
  static auto* const instance = new HandleTable<ScreenedLayer>("a prepared output layer");
  return *instance;
}

std::tuple<Tensor, Tensor> top_k(const ScreenedLayer& layer, const Tensor& x, int64_t k) {
  const Rows<float> rows = rows_of<float>(x, "x");
  check_size(x, "x", 1, layer.depth);
  check_top_k(layer, k);
  const Tensor scores = empty_tensor({rows.count, k}, ScalarType::Float);
  const Tensor found = empty_tensor({rows.count, k}, ScalarType::Long);
  for (int64_t t = 0; t < rows.count; ++t)
    screened_top_k(layer, rows.data + t * rows.stride, k, data_of<float>(scores) + t * k,
                   data_of<int64_t>(found) + t * k);
  return {scores, found};
}

Tensor rank(const ScreenedLayer& layer, const Tensor& x, const Tensor& targets) {
  const Rows<float> rows = rows_of<float>(x, "x");
  check_size(x, "x", 1, layer.depth);
  const Dense<int64_t> target = dense_of<int64_t>(targets, "targets", 1);
  check_size(targets, "targets", 0, rows.count);
  const Tensor ranks = empty_tensor({rows.count}, ScalarType::Long);
  for (int64_t t = 0; t < rows.count; ++t)
    data_of<int64_t>(ranks)[t] = screened_rank(layer, rows.data + t * rows.stride, target.data[t]);
  return ranks;
}

std::tuple<Tensor, Tensor> screened_topk(const Tensor& x, const Tensor& weight,
                                         const std::optional<Tensor>& bias, const Tensor& codes,
                                         const Tensor& steps, const Tensor& rows, int64_t k) {
  return top_k(screened_layer_of(weight, bias, codes, steps, rows), x, k);
}

Tensor screened_rank_of(const Tensor& x, const Tensor& targets, const Tensor& weight,
                        const std::optional<Tensor>& bias, const Tensor& codes, const Tensor& steps,
                        const Tensor& rows) {
  return rank(screened_layer_of(weight, bias, codes, steps, rows), x, targets);
}

int64_t prepare_screened(const Tensor& weight, const std::optional<Tensor>& bias,
                         const Tensor& codes, const Tensor& steps, const Tensor& rows) {
  ScreenedLayer layer = screened_layer_of(weight, bias, codes, steps, rows);
  use_huge_pages(layer.codes_tensor);
  return table().add(std::move(layer));
}

std::tuple<Tensor, Tensor> run_screened_topk(const Tensor& x, int64_t handle, int64_t k) {
  return top_k(*table().find(handle), x, k);
}

Tensor run_screened_rank(const Tensor& x, const Tensor& targets, int64_t handle) {
  return rank(*table().find(handle), x, targets);
}

// How many exact scores the top k of each token takes.
Tensor count_survivors(const Tensor& x, int64_t handle, int64_t k) {
  const auto layer = table().find(handle);
  const Rows<float> rows = rows_of<float>(x, "x");
  check_size(x, "x", 1, layer->depth);
  check_top_k(*layer, k);
  const Tensor counts = empty_tensor({rows.count}, ScalarType::Long);
  const Buffer<float> scores(k);
  const Buffer<int64_t> found(k);
  for (int64_t t = 0; t < rows.count; ++t)
    data_of<int64_t>(counts)[t] =
        screened_top_k(*layer, rows.data + t * rows.stride, k, scores.get(), found.get());
  return counts;
}

void release_screened(int64_t handle) { table().remove(handle); }

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("screened_topk", TORCH_BOX(&blockgate::screened_topk));
  m.impl("screened_rank", TORCH_BOX(&blockgate::screened_rank_of));
  m.impl("prepare_screened", TORCH_BOX(&blockgate::prepare_screened));
  m.impl("run_screened_topk", TORCH_BOX(&blockgate::run_screened_topk));
  m.impl("run_screened_rank", TORCH_BOX(&blockgate::run_screened_rank));
  m.impl("count_survivors", TORCH_BOX(&blockgate::count_survivors));
}

STABLE_TORCH_LIBRARY_IMPL(blockgate, CompositeExplicitAutograd, m) {
  m.impl("release_screened", TORCH_BOX(&blockgate::release_screened));
}
