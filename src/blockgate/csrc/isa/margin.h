// Margin gates for one row of scores, and their gradient.
//
// The value of a kept score is its distance to the runner-up, the largest score of the group that
// is not kept, and a little more: almost 0 where a block is about to change, and the same if all
// scores move together. With all blocks open there is no runner-up; one that lies an average step
// below the lowest score takes its place.
#pragma once

#include "isa/topk.h"

namespace blockgate::BLOCKGATE_ISA {

// The least value: scores that hardly differ then mean gates that hardly differ, and never 0 / 0.
inline constexpr double MARGIN_FLOOR = 0.001;

// Integers that order as the scores do, negative ones included and NaN above all; padded as in
// make_keys with a key below every other.
template <class T>
BLOCKGATE_INLINE KeyRange<Key<T>> make_ordered_keys(const T* scores, int64_t count, Key<T>* keys) {
  using K = Key<T>;
  constexpr K SIGN = K(1) << (8 * sizeof(K) - 1);
  KeyRange<K> range{KeyOf<T>::NAN_KEY, SIGN};
  for (int64_t i = 0; i < count; ++i) {
    // + 0 makes -0 the same number as 0.
    const T score = scores[i] + T(0);
    K bits;
    __builtin_memcpy(&bits, &score, sizeof bits);
    const K ordered = bits ^ (bits < 0 ? K(~SIGN) : K(0));
    const K key = score == score ? ordered : KeyOf<T>::NAN_KEY;
    keys[i] = key;
    range.lowest = key < range.lowest ? key : range.lowest;
    range.highest = key > range.highest ? key : range.highest;
  }
  for (int64_t i = count; i < ceil_div(count, LANES<T>) * LANES<T>; ++i) keys[i] = SIGN;
  return range;
}

// A group's runner-up: its index, and what the kept scores are measured from. With all blocks open
// that is made of the lowest score, at `index`, and the highest one.
template <class T>
struct RunnerUp {
  int64_t index, highest;
  T threshold;
};

// `kept` ascending indices, from `offset` on, are those of the group's largest scores.
template <class T>
BLOCKGATE_INLINE RunnerUp<T> runner_up(const T* scores, int64_t count, const int64_t* indices,
                                       int64_t kept, int64_t offset) {
  if (kept < count) {
    int64_t next = 0, best = -1;
    for (int64_t i = 0; i < count; ++i) {
      if (next < kept && indices[next] == i + offset) ++next;
      else if (best < 0 || scores[i] > scores[best]) best = i;
    }
    return {best, best, scores[best] - T(MARGIN_FLOOR)};
  }
  int64_t lowest = 0, highest = 0;
  for (int64_t i = 1; i < count; ++i) {
    if (scores[i] <= scores[lowest]) lowest = i;
    if (scores[i] > scores[highest]) highest = i;
  }
  const T low = scores[lowest], high = scores[highest];
  return {lowest, highest, low - (high - low) / T(count) - T(MARGIN_FLOOR)};
}

template <class T>
BLOCKGATE_INLINE void margin_group(const T* scores, int64_t count, int64_t kept, int64_t offset,
                                   Key<T>* keys, T* values, int64_t* indices) {
  const KeyRange<Key<T>> range = make_ordered_keys<T>(scores, count, keys);
  pick<Key<T>>(keys, count, kept, range, keys + ceil_div(count, PANEL) * PANEL, indices);
  const T threshold = runner_up(scores, count, indices, kept, 0).threshold;
  for (int64_t i = 0; i < kept; ++i) {
    values[i] = scores[indices[i]] - threshold;
    indices[i] += offset;
  }
}

// Writes the index of every group's runner-up to `runners`: it has a gradient too.
template <class T>
void margin_backward(const TopK& spec, const T* grad_gates, const T* scores, const T* gates,
                     const int64_t* indices, T* grad_scores, int64_t* runners) {
  const int64_t group = spec.scores / spec.groups, kept = spec.open_blocks;
  double squares = 0, dot = 0;
  // grad_scores holds the values until their gradients are known.
  for (int64_t g = 0; g < spec.groups; ++g) {
    const int64_t* chosen = indices + g * kept;
    const RunnerUp<T> runner =
        runner_up(scores + g * group, group, chosen, kept, g * group);
    runners[g] = g * group + runner.index;
    for (int64_t i = 0; i < kept; ++i) {
      const T value = scores[chosen[i]] - runner.threshold;
      grad_scores[chosen[i]] = value;
      squares += double(value) * double(value);
      dot += double(grad_gates[g * kept + i]) * double(gates[g * kept + i]);
    }
  }
  const double scale = squares == 0 ? 0 : 1.0 / __builtin_sqrt(squares / double(spec.scores));
  const double mean_dot = dot / double(spec.scores);
  for (int64_t g = 0; g < spec.groups; ++g) {
    double total = 0;
    for (int64_t i = g * kept; i < (g + 1) * kept; ++i) {
      T& grad = grad_scores[indices[i]];
      const double found = grad == 0 ? 0 : scale * (grad_gates[i] - gates[i] * mean_dot);
      grad = T(found);
      total += found;
    }
    grad_scores[runners[g]] -= T(total);
    if (kept == group) {
      const double step = total / double(group);
      const int64_t highest =
          runner_up(scores + g * group, group, indices + g * kept, kept, g * group).highest;
      grad_scores[g * group + highest] += T(step);
      grad_scores[runners[g]] -= T(step);
    }
  }
}

template <class T>
void top_k(const TopK& spec, const T* scores, T* gates, int64_t* indices, T* scratch) {
  if (spec.normalise == Normalise::margin)
    top_k_by(margin_group<T>, spec, scores, gates, indices, scratch);
  else
    top_k_by(select_group<T>, spec, scores, gates, indices, scratch);
}

template <class T>
void top_k_backward(const TopK& spec, const T* grad_gates, const T* scores, const T* gates,
                    const int64_t* indices, T* grad_scores, int64_t* runners) {
  if (spec.normalise == Normalise::margin)
    margin_backward(spec, grad_gates, scores, gates, indices, grad_scores, runners);
  else
    relu_backward(spec, grad_gates, scores, gates, indices, grad_scores);
}

}  // namespace blockgate::BLOCKGATE_ISA
