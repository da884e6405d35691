// The likeliest words of an adaptive softmax, whose output layer was prepared without a gate.
#include "bind/groups.h"
#include "host/adaptive.h"
#include "host/parallel.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

namespace blockgate {
namespace {

WordGroups word_groups_of(const Integers& bounds, const Dense<float>& weight, const Dense<float>& bias, int64_t words,
                          int64_t depth) {
  WordGroups groups{weight.data, bias.data, {bounds.begin(), bounds.end()}};
  STD_TORCH_CHECK(groups.count() >= 1 && groups.bounds.front() > 0 && groups.bounds.back() == words,
                  "bounds: expected at least 2, from 1 to the number of words, ", words);
  for (int64_t g = 0; g < groups.count(); ++g)
    STD_TORCH_CHECK(groups.bounds[g] < groups.bounds[g + 1], "bounds: expected rising ones, got ", groups.bounds[g],
                    " before ", groups.bounds[g + 1]);
  check_size(weight.tensor, "group_weight", 0, groups.count());
  check_size(weight.tensor, "group_weight", 1, depth);
  check_size(bias.tensor, "group_bias", 0, groups.count());
  return groups;
}

std::tuple<Tensor, Tensor> run_prepared_adaptive(const Tensor& x, int64_t handle, const Tensor& group_weight,
                                                 const Tensor& group_bias, Integers bounds, int64_t k) {
  const std::shared_ptr<const PreparedLayer> layer = find_prepared(handle);
  const Grid& grid = layer->grid;
  STD_TORCH_CHECK(!layer->gate, "handle: expected a layer without a gate");
  const Rows<float> rows = rows_of<float>(x, "x");
  check_size(x, "x", 1, grid.in);
  STD_TORCH_CHECK(k >= 1 && k <= grid.out, "k: expected 1 to ", grid.out, " (words), got ", k);
  const Dense<float> weight = dense_of<float>(group_weight, "group_weight", 2);
  const Dense<float> bias = dense_of<float>(group_bias, "group_bias", 1);
  const WordGroups groups = word_groups_of(bounds, weight, bias, grid.out, grid.in);
  const Tensor values = empty_tensor({rows.count, k}, ScalarType::Float);
  const Tensor words = empty_tensor({rows.count, k}, ScalarType::Long);
  if (rows.count == 0) return {values, words};

  Choice::Ways ways;
  if (threads_for(groups.bounds[0] * grid.in) > 1) ways.add({thread_count(), 0});
  ways.add({1, 0});
  Choices& choices = *layer->choices;
  const auto run = [&](Choice::Way way) {
    const ThreadLimit limit(way.threads);
    int64_t computed = 0;
    for (int64_t t = 0; t < rows.count; ++t)
      computed += likeliest_words(*layer, groups, rows.data + t * rows.stride, k, data_of<float>(values) + t * k,
                                  data_of<int64_t>(words) + t * k);
    choices.likeliest_rows += rows.count;
    choices.likeliest_groups += computed;
  };
  if (ways.count == 1) run(ways.of[0]);
  else choices.likeliest[rows.count].run(ways, double(rows.count), run);
  return {values, words};
}

// Rows that were asked for their likeliest words so far, and the groups that were computed for them.
std::tuple<int64_t, int64_t> adaptive_counts(int64_t handle) {
  const Choices& choices = *find_prepared(handle)->choices;
  return {choices.likeliest_rows.load(), choices.likeliest_groups.load()};
}

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("run_prepared_adaptive", TORCH_BOX(&blockgate::run_prepared_adaptive));
}

STABLE_TORCH_LIBRARY_IMPL(blockgate, CompositeExplicitAutograd, m) {
  m.impl("adaptive_counts", TORCH_BOX(&blockgate::adaptive_counts));
}
