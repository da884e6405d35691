#include "host/screen.h"
#include "host/buffer.h"
#include "host/dispatch.h"
#include "host/parallel.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace blockgate {
namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();
// Panels of one task, and exact scores.
constexpr int64_t TASK_PANELS = 16, TASK_SCORES = 32;
// Of the rows; with more survivors, all are computed in order.
constexpr double MOST_SURVIVORS = 0.25;

// Everything that is computed for one token.
struct Scan {
  const ScreenedLayer& layer;
  const float *weight, *bias;
  Buffer<int8_t> x_steps;
  Buffer<float> x_sizes, lower, upper, panel_lower, panel_upper, scores;
  Buffer<int32_t> x_offsets, rows;
  Buffer<double> x;
  ScreenNorms norms{0, 0, true};

  Scan(const ScreenedLayer& of, const float* inputs)
      : layer(of),
        weight(static_cast<const float*>(of.weight_tensor.const_data_ptr())),
        bias(of.bias_tensor ? static_cast<const float*>(of.bias_tensor->const_data_ptr()) : nullptr),
        x_steps(of.groups() * SCREEN_GROUP),
        x_sizes(of.groups()),
        lower(of.panels() * PANEL),
        upper(of.panels() * PANEL),
        panel_lower(of.panels()),
        panel_upper(of.panels()),
        scores(of.count),
        x_offsets(of.groups()),
        rows(of.count),
        x(ceil_div(of.depth, EXACT_LANES) * EXACT_LANES) {
    norms = kernels().screen_input(inputs, layer.depth, input());
  }

  ScreenInput input() const { return {x_steps.get(), x_sizes.get(), x_offsets.get(), x.get()}; }
  ScreenBounds bounds() const {
    return {lower.get(), upper.get(), panel_lower.get(), panel_upper.get()};
  }

  float exact(int64_t row, int64_t next) const {
    return kernels().exact_score(weight + row * layer.depth, layer.depth, x.get(),
                                 bias ? bias[row] : 0, next < 0 ? nullptr : weight + next * layer.depth);
  }

  void bound() const {
    const int64_t panels = layer.panels(), groups = layer.groups();
    // More than twice as many roundings as there are on the way of any term: the groups' sums, the bounds
    // themselves, and the exact score's own.
    const double rounding = double(2 * groups + 32) * 0x1p-24;
    const ScreenSlack slack{
        .missed = float(norms.input * (1 + rounding)),
        .held = float(norms.missed * (1 + rounding) + norms.input * rounding),
        .bias = float(rounding),
        // With what numbers below the smallest normal one may lose.
        .rest = 0x1p-120f,
    };
    const ScreenRows rows_of_layer{
        .groups = groups,
        .codes = static_cast<const uint8_t*>(layer.codes_tensor.const_data_ptr()),
        .steps = static_cast<const uint8_t*>(layer.steps_tensor.const_data_ptr()),
        .rows = static_cast<const float*>(layer.rows_tensor.const_data_ptr()),
    };
    run_tasks(ceil_div(panels, TASK_PANELS), threads_for(layer.count * layer.depth / 16),
              [&](int64_t task) {
                kernels().screen(rows_of_layer, input(), slack, task * TASK_PANELS,
                                 smaller(panels, (task + 1) * TASK_PANELS), bounds());
              });
  }

  // The k-th largest of all lower bounds.
  float threshold(int64_t k) const {
    const int64_t panels = layer.panels();
    float least = -INFINITE;
    if (k <= panels) {
      // At least k rows reach the k-th largest panel: only those need be sorted.
      Buffer<float> sorted(panels);
      std::copy_n(panel_lower.get(), panels, sorted.get());
      std::nth_element(sorted.get(), sorted.get() + k - 1, sorted.get() + panels, std::greater<>());
      least = sorted[k - 1];
    }
    Buffer<float> reached(layer.count);
    const int64_t found = rows_with(least, lower.get(), panel_lower.get(),
                                    [&](int64_t place, int64_t row) { reached[place] = lower[row]; });
    std::nth_element(reached.get(), reached.get() + k - 1, reached.get() + found, std::greater<>());
    return reached[k - 1];
  }

  // Rows whose bound is at least `least`, ascending; tells `take` of each, and returns how many.
  template <class Take>
  int64_t rows_with(float least, const float* bound, const float* panel_bound,
                    const Take& take) const {
    int64_t found = 0;
    for (int64_t panel = 0; panel < layer.panels(); ++panel) {
      if (panel_bound[panel] < least) continue;
      const int64_t end = smaller(layer.count, (panel + 1) * PANEL);
      for (int64_t row = panel * PANEL; row < end; ++row)
        if (bound[row] >= least) take(found++, row);
    }
    return found;
  }

  // The exact scores of rows[0 .. count), or of all rows.
  void score(int64_t count) const {
    const bool all = count == layer.count;
    run_tasks(ceil_div(count, TASK_SCORES), threads_for(count * layer.depth / 2), [&](int64_t task) {
      const int64_t end = smaller(count, (task + 1) * TASK_SCORES);
      for (int64_t i = task * TASK_SCORES; i < end; ++i)
        scores[i] = exact(rows[i], all ? -1 : i + 1 < end ? rows[i + 1] : -1);
    });
  }

  int64_t take_all() const {
    for (int64_t row = 0; row < layer.count; ++row) rows[row] = int32_t(row);
    return layer.count;
  }
};

void check_bytes(const Tensor& t, const char* name, const ScreenedLayer& layer, int64_t bytes) {
  check_tensor(t, name, ScalarType::Byte, 3);
  check_size(t, name, 0, layer.panels());
  check_size(t, name, 1, layer.groups());
  check_size(t, name, 2, bytes);
  STD_TORCH_CHECK(t.is_contiguous(), name, ": expected a contiguous tensor");
}

}  // namespace

ScreenedLayer screened_layer_of(const Tensor& weight, const std::optional<Tensor>& bias,
                                const Tensor& codes, const Tensor& steps, const Tensor& rows) {
  const Dense<float> w = dense_of<float>(weight, "weight", 2);
  STD_TORCH_CHECK(weight.size(0) > 0 && weight.size(1) > 0 &&
                      weight.size(0) <= std::numeric_limits<int32_t>::max(),
                  "weight: expected 1 to 2^31 - 1 rows of at least one input, got shape ",
                  shape_text(weight));
  ScreenedLayer layer{
      .weight_tensor = w.tensor,
      .codes_tensor = codes,
      .steps_tensor = steps,
      .rows_tensor = dense_of<float>(rows, "rows", 3).tensor,
      .bias_tensor = std::nullopt,
      .count = weight.size(0),
      .depth = weight.size(1),
  };
  if (bias) layer.bias_tensor = bias_of<float>(bias, "bias", layer.count, weight).tensor;
  check_bytes(codes, "codes", layer, SCREEN_GROUP * PANEL / 2);
  check_bytes(steps, "steps", layer, PANEL);
  check_size(rows, "rows", 0, layer.panels());
  check_size(rows, "rows", 1, SCREEN_ROW_VALUES);
  check_size(rows, "rows", 2, PANEL);
  return layer;
}

void check_top_k(const ScreenedLayer& layer, int64_t k) {
  STD_TORCH_CHECK(k >= 1 && k <= layer.count, "k: expected 1 to ", layer.count,
                  " (rows of the weight), got ", k);
}

int64_t screened_top_k(const ScreenedLayer& layer, const float* x, int64_t k, float* scores,
                       int64_t* rows) {
  const Scan scan(layer, x);
  if (!scan.norms.finite) {
    for (int64_t i = 0; i < k; ++i) {
      scores[i] = std::numeric_limits<float>::quiet_NaN();
      rows[i] = i;
    }
    return 0;
  }
  const int64_t most = int64_t(double(layer.count) * MOST_SURVIVORS);
  int64_t count = layer.count;
  if (k <= most) {
    scan.bound();
    const float threshold = scan.threshold(k);
    count = scan.rows_with(threshold, scan.upper.get(), scan.panel_upper.get(),
                           [&](int64_t place, int64_t row) { scan.rows[place] = int32_t(row); });
  }
  if (count > most) count = scan.take_all();
  scan.score(count);

  Buffer<int32_t> order(count);
  for (int64_t i = 0; i < count; ++i) order[i] = int32_t(i);
  const auto before = [&](int32_t a, int32_t b) {
    const float first = scan.scores[a], second = scan.scores[b];
    return first > second || (first == second && a < b);
  };
  std::partial_sort(order.get(), order.get() + k, order.get() + count, before);
  for (int64_t i = 0; i < k; ++i) {
    scores[i] = scan.scores[order[i]];
    rows[i] = scan.rows[order[i]];
  }
  return count;
}

int64_t screened_rank(const ScreenedLayer& layer, const float* x, int64_t target) {
  STD_TORCH_CHECK(target >= 0 && target < layer.count, "targets: expected rows from 0 to ",
                  layer.count - 1, ", got ", target);
  const Scan scan(layer, x);
  if (!scan.norms.finite) return layer.count;
  const float score = scan.exact(target, -1);
  int64_t count = 0, ahead = 0;
  if (std::fabs(score) < SCREEN_LARGEST) {
    scan.bound();
    for (int64_t row = 0; row < layer.count; ++row) {
      if (scan.upper[row] < score) continue;
      if (scan.lower[row] > score) ++ahead;
      else scan.rows[count++] = int32_t(row);
    }
  } else {
    count = scan.take_all();
  }
  scan.score(count);
  for (int64_t i = 0; i < count; ++i)
    ahead += scan.scores[i] > score || (scan.scores[i] == score && scan.rows[i] < target);
  return ahead;
}

}  // namespace blockgate
