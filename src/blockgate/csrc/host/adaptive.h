// Adaptive softmax on a packed output layer: the likeliest words, without the groups that hold none of them.
#pragma once

#include "host/prepared.h"

#include <vector>

namespace blockgate __attribute__((visibility("hidden"))) {

// Words [0, bounds[0]) are frequent; group j holds [bounds[j], bounds[j + 1]) and has a score of its own.
struct WordGroups {
  const float *weight, *bias;  // (groups, inputs) and (groups)
  std::vector<int64_t> bounds;

  int64_t count() const { return int64_t(bounds.size()) - 1; }
};

// The k likeliest words of one token by falling value, equals by rising word. A value is the word's score, in a group
// the group's score plus the logarithm of the word's share of the group: the logarithm of its probability but for a
// number that all words share. Returns how many groups were computed. NaN, or inf in x: values NaN, words 0 to k - 1.
int64_t likeliest_words(const PreparedLayer& layer, const WordGroups& groups, const float* x, int64_t k, float* values,
                        int64_t* words);

}  // namespace blockgate
