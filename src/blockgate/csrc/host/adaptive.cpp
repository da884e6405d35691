#include "host/adaptive.h"
#include "host/buffer.h"
#include "host/dispatch.h"
#include "host/parallel.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace blockgate {
namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();
// Words whose shares one task adds up.
constexpr int64_t TASK_WORDS = 512;

struct Found {
  float value;
  int64_t word;
};

bool comes_before(const Found& a, const Found& b) {
  return a.value > b.value || (a.value == b.value && a.word < b.word);
}

// The k first of all words that it is told of.
class Likeliest {
 public:
  explicit Likeliest(int64_t k) : k_(k) { found_.reserve(2 * k + 64); }

  // What a word's value must reach to be among them; NaN has no place in any order.
  float least() const { return least_; }
  bool bad() const { return bad_; }

  void see(float value, int64_t word) {
    bad_ |= value != value;
    if (!(value >= least_)) return;
    found_.push_back({value, word});
    if (int64_t(found_.size()) >= 2 * k_ + 64) keep();
  }

  void keep() {
    if (bad_ || int64_t(found_.size()) < k_) return;
    std::nth_element(found_.begin(), found_.begin() + (k_ - 1), found_.end(), comes_before);
    found_.resize(k_);
    least_ = found_.back().value;
  }

  const std::vector<Found>& in_order() {
    keep();
    std::sort(found_.begin(), found_.end(), comes_before);
    return found_;
  }

 private:
  int64_t k_;
  std::vector<Found> found_;
  float least_ = -INFINITE;
  bool bad_ = false;
};

// log(sum of e^score). The largest term adds 1 to the sum of shares, so that no score exceeds the result.
float log_sum(const float* scores, int64_t count) {
  const float largest = *std::max_element(scores, scores + count);
  const int64_t tasks = ceil_div(count, TASK_WORDS);
  const Buffer<double> sums(tasks);
  run_tasks(tasks, threads_for(count * 32), [&](int64_t task) {
    double sum = 0;
    for (int64_t i = task * TASK_WORDS; i < smaller(count, (task + 1) * TASK_WORDS); ++i)
      sum += std::exp(scores[i] - largest);
    sums[task] = sum;
  });
  return largest + float(std::log(std::accumulate(sums.get(), sums.get() + tasks, 0.0)));
}

// The groups' scores, as exact ones of screened layers are.
Buffer<float> group_scores(const WordGroups& groups, const float* x, int64_t depth) {
  const int64_t padded = ceil_div(depth, EXACT_LANES) * EXACT_LANES;
  const Buffer<double> exact(padded);
  for (int64_t i = 0; i < padded; ++i) exact[i] = i < depth ? double(x[i]) : 0;
  Buffer<float> scores(groups.count());
  for (int64_t g = 0; g < groups.count(); ++g)
    scores[g] = kernels().exact_score(groups.weight + g * depth, depth, exact.get(), groups.bias[g], nullptr);
  return scores;
}

}  // namespace

int64_t likeliest_words(const PreparedLayer& layer, const WordGroups& groups, const float* x, int64_t k, float* values,
                        int64_t* words) {
  const Grid& grid = layer.grid;
  const Buffer<float> y(grid.out);
  const auto compute = [&](int64_t begin, int64_t end) {
    run_packed_rows(layer.weight, grid, x, layer.bias.data(), y.get(), begin / grid.block_out,
                    ceil_div(end, grid.block_out));
  };
  Likeliest likeliest(k);
  int64_t computed = 0;
  bool good = std::all_of(x, x + grid.in, [](float value) { return std::isfinite(value); });
  if (good) {
    const Buffer<float> scores = group_scores(groups, x, grid.in);
    std::vector<int64_t> order(groups.count());
    std::iota(order.begin(), order.end(), 0);
    good = std::none_of(order.begin(), order.end(), [&](int64_t g) { return std::isnan(scores[g]); });
    if (!good) order.clear();
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
    compute(0, groups.bounds[0]);
    for (int64_t word = 0; word < groups.bounds[0]; ++word) likeliest.see(y[word], word);
    likeliest.keep();
    for (const int64_t g : order) {
      // A word's share of its group is at most 1, so that its value is at most the group's score.
      if (scores[g] < likeliest.least()) break;
      const int64_t begin = groups.bounds[g], end = groups.bounds[g + 1];
      compute(begin, end);
      ++computed;
      const float sum = log_sum(y.get() + begin, end - begin);
      for (int64_t word = begin; word < end; ++word) likeliest.see(scores[g] + (y[word] - sum), word);
      likeliest.keep();
    }
    good = good && !likeliest.bad();
  }
  for (int64_t i = 0; i < k; ++i) {
    values[i] = good ? 0 : std::numeric_limits<float>::quiet_NaN();
    words[i] = i;
  }
  if (!good) return computed;
  const std::vector<Found>& found = likeliest.in_order();
  for (int64_t i = 0; i < k; ++i) {
    values[i] = found[i].value;
    words[i] = found[i].word;
  }
  return computed;
}

}  // namespace blockgate
