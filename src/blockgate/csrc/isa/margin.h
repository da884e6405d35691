// Margin gates for one row of scores, and their gradient.
//
// The value of a kept score is its distance to the runner-up, the largest score of the group that
// is not kept, and a floor more: near the floor where a block is about to change, and the same if
// all scores move together. With all blocks open the lowest score takes the place of the runner-up.
#pragma once

#include "isa/topk.h"

namespace blockgate::BLOCKGATE_ISA {

// The least value of a kept score. Near a dense layer it is 1 with all blocks open, so that scores
// that hardly differ mean gates that hardly differ, and falls with the cube of the density. Never
// 0: equal scores would give 0 / 0.
inline double margin_floor(Normalise rule, int64_t kept, int64_t count) {
  const double density = double(kept) / double(count), cube = density * density * density;
  return rule == Normalise::margin_near_dense && cube > 0.001 ? cube : 0.001;
}

// Integers that order as the scores do, negative ones included and NaN above all; padded as in
// make_keys with a key below every other.
template <class T>
BLOCKGATE_INLINE KeyRange<Key<T>> make_ordered_keys(const T* scores, int64_t count, Key<T>* keys) {
  using K = Key<T>;
  constexpr int L = LANES<T>;
  constexpr K SIGN = K(1) << (8 * sizeof(K) - 1);
  const Vec<K> nan_key = broadcast_key<K>(KeyOf<T>::NAN_KEY);
  Vec<K> lowest = nan_key, highest = broadcast_key<K>(SIGN);
  for (int64_t i = 0; i < count; i += L) {
    Vec<T> s;
    if (i + L <= count) {
      s = load(scores + i);
    } else {
      // The last score stands in for what is missing, so that it changes no range.
      T edge[L];
      for (int j = 0; j < L; ++j) edge[j] = scores[i + j < count ? i + j : count - 1];
      s = load(edge);
    }
    // + 0 makes -0 the same number as 0.
    const Vec<K> bits = (Vec<K>)(s + Vec<T>{});
    const Vec<K> ordered = bits ^ ((bits < Vec<K>{}) & broadcast_key<K>(K(~SIGN)));
    const Vec<K> key = s == s ? ordered : nan_key;
    lowest = key < lowest ? key : lowest;
    highest = key > highest ? key : highest;
    store(keys + i, key);
  }
  for (int64_t i = count; i < ceil_div(count, L) * L; ++i) keys[i] = SIGN;
  KeyRange<K> range{lowest[0], highest[0]};
  for (int j = 1; j < L; ++j) {
    if (lowest[j] < range.lowest) range.lowest = lowest[j];
    if (highest[j] > range.highest) range.highest = highest[j];
  }
  return range;
}

// The first of the largest scores that are not NaN; -1 if there is none.
template <class T>
BLOCKGATE_INLINE int64_t first_largest(const T* scores, int64_t count) {
  constexpr int L = LANES<T>;
  T top = -__builtin_inf();
  Vec<T> tops = broadcast<T>(top);
  int64_t i = 0;
  for (; i + L <= count; i += L) {
    const Vec<T> s = load(scores + i);
    tops = s > tops ? s : tops;
  }
  for (; i < count; ++i) top = scores[i] > top ? scores[i] : top;
  for (int j = 0; j < L; ++j) top = tops[j] > top ? tops[j] : top;
  for (i = 0; i < count; ++i)
    if (scores[i] == top) return i;
  return -1;
}

// A group's runner-up: its index, and what the kept scores are measured from. With all blocks open,
// the lowest score, and the index of the highest one.
template <class T>
struct RunnerUp {
  int64_t index, highest;
  T threshold;
};

// `indices` (spec.open_blocks), counted from `offset` on, are those of the group's largest scores.
// `scratch` holds `count` numbers.
template <class T>
BLOCKGATE_INLINE RunnerUp<T> runner_up(const TopK& spec, const T* scores, int64_t count,
                                       const int64_t* indices, int64_t offset, T* scratch) {
  const int64_t kept = spec.open_blocks;
  const T floor = T(margin_floor(spec.normalise, kept, count));
  if (kept < count) {
    __builtin_memcpy(scratch, scores, count * sizeof(T));
    // A search over all that skips kept ones would have to branch at each.
    for (int64_t i = 0; i < kept; ++i) scratch[indices[i] - offset] = T(__builtin_nan(""));
    const int64_t best = first_largest(scratch, count);
    // Kept scores come first: what is left and has no largest is all NaN.
    if (best < 0) return {0, 0, T(__builtin_nan(""))};
    return {best, best, scores[best] - floor};
  }
  int64_t lowest = 0, highest = 0;
  for (int64_t i = 1; i < count; ++i) {
    lowest = scores[i] <= scores[lowest] ? i : lowest;
    highest = scores[i] > scores[highest] ? i : highest;
  }
  const T low = scores[lowest];
  // Fresh gates begin with an average step: they are to differ from the start.
  const T step = spec.normalise == Normalise::margin ? (scores[highest] - low) / T(count) : T(0);
  return {lowest, highest, low - step - floor};
}

template <class T>
BLOCKGATE_INLINE void margin_group(const TopK& spec, const T* scores, int64_t count,
                                   int64_t offset, Key<T>* keys, T* values, int64_t* indices) {
  const int64_t kept = spec.open_blocks;
  const KeyRange<Key<T>> range = make_ordered_keys<T>(scores, count, keys);
  pick<Key<T>>(keys, count, kept, range, keys + ceil_div(count, PANEL) * PANEL, indices);
  // The keys have done their work; their memory is the caller's scratch.
  T* scratch = reinterpret_cast<T*>(keys);
  const T threshold = runner_up(spec, scores, count, indices, 0, scratch).threshold;
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
  // grad_scores is scratch, then holds the values until their gradients are known.
  for (int64_t g = 0; g < spec.groups; ++g) {
    const int64_t* chosen = indices + g * kept;
    T* mine = grad_scores + g * group;
    const RunnerUp<T> runner =
        runner_up(spec, scores + g * group, group, chosen, g * group, mine);
    __builtin_memset(mine, 0, group * sizeof(T));
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
    if (kept == group && spec.normalise == Normalise::margin) {
      const double step = total / double(group);
      const T* mine = scores + g * group;
      const int64_t highest =
          runner_up(spec, mine, group, indices + g * kept, g * group, grad_scores).highest;
      grad_scores[g * group + highest] += T(step);
      grad_scores[runners[g]] -= T(step);
    }
  }
}

template <class T>
void top_k(const TopK& spec, const T* scores, T* gates, int64_t* indices, T* scratch) {
  if (is_margin(spec.normalise))
    top_k_by(margin_group<T>, spec, scores, gates, indices, scratch);
  else
    top_k_by(select_group<T>, spec, scores, gates, indices, scratch);
}

template <class T>
void top_k_backward(const TopK& spec, const T* grad_gates, const T* scores, const T* gates,
                    const int64_t* indices, T* grad_scores, int64_t* runners) {
  if (is_margin(spec.normalise))
    margin_backward(spec, grad_gates, scores, gates, indices, grad_scores, runners);
  else
    relu_backward(spec, grad_gates, scores, gates, indices, grad_scores);
}

}  // namespace blockgate::BLOCKGATE_ISA
