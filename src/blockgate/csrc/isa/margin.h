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
  constexpr K SIGN = K(1) << (8 * sizeof(K) - 1);
  return write_keys<T>(scores, count, SIGN, [](Vec<T> s) __attribute__((always_inline)) {
    // + 0 makes -0 the same number as 0.
    const Vec<K> bits = (Vec<K>)(s + Vec<T>{});
    const Vec<K> ordered = bits ^ ((bits < Vec<K>{}) & broadcast_key<K>(K(~SIGN)));
    return s == s ? ordered : broadcast_key<K>(KeyOf<T>::NAN_KEY);
  }, keys);
}

// The first of the largest scores that are not NaN; -1 if there is none.
template <class T>
BLOCKGATE_INLINE int64_t first_largest(const T* scores, int64_t count) {
  using K = Key<T>;
  constexpr int L = LANES<T>;
  const Vec<T> least = broadcast<T>(-__builtin_inf());
  const auto vector_at = [&](int64_t i) __attribute__((always_inline)) {
    if (i + L <= count) return load(scores + i);
    const Vec<K> real = lane_numbers<K>() < broadcast_key(K(count - i));
    return real ? load_first(scores + i, count - i) : least;
  };
  Vec<T> tops = least;
  for (int64_t i = 0; i < count; i += L) {
    const Vec<T> s = vector_at(i);
    tops = s > tops ? s : tops;
  }
  const Vec<T> top = broadcast<T>(horizontal_largest<T>(tops));
  for (int64_t i = 0; i < count; i += L) {
    const uint64_t found = sign_bits(Vec<K>(vector_at(i) == top));
    if (found && i + __builtin_ctzll(found) < count) return i + __builtin_ctzll(found);
  }
  return -1;
}

// The last of the lowest scores and the first of the highest.
struct Extremes {
  int64_t lowest, highest;
};

// `keys` holds `count` of them, in whole vectors.
template <class T>
BLOCKGATE_INLINE Extremes find_extremes(const T* scores, int64_t count, Key<T>* keys) {
  using K = Key<T>;
  const KeyRange<K> range = make_ordered_keys<T>(scores, count, keys);
  Extremes found{0, 0};
  if (range.highest == KeyOf<T>::NAN_KEY) {
    for (int64_t i = 1; i < count; ++i) {
      found.lowest = scores[i] <= scores[found.lowest] ? i : found.lowest;
      found.highest = scores[i] > scores[found.highest] ? i : found.highest;
    }
    return found;
  }
  const Vec<K> lowest = broadcast_key(range.lowest), highest = broadcast_key(range.highest);
  found.highest = -1;
  for (int64_t first = 0; first < count; first += BITS) {
    const auto where = [&](const auto& test) {
      return bits_where(keys + first, smaller(BITS, count - first), test);
    };
    const uint64_t low = where([&](Vec<K> k) { return k == lowest; });
    const uint64_t high = where([&](Vec<K> k) { return k == highest; });
    if (low) found.lowest = first + BITS - 1 - __builtin_clzll(low);
    if (high && found.highest < 0) found.highest = first + __builtin_ctzll(high);
  }
  return found;
}

// What the kept scores of a group are measured from.
template <class T>
BLOCKGATE_INLINE T margin_threshold(const TopK& spec, T runner_up) {
  return runner_up - T(margin_floor(spec.normalise, spec.open_blocks, spec.scores / spec.groups));
}

// The same with all blocks open, from the lowest score. Fresh gates begin with an average step: they
// are to differ from the start.
template <class T>
BLOCKGATE_INLINE T open_threshold(const TopK& spec, T lowest, T highest) {
  const int64_t count = spec.scores / spec.groups;
  const T step = spec.normalise == Normalise::margin ? (highest - lowest) / T(count) : T(0);
  return lowest - step - T(margin_floor(spec.normalise, count, count));
}

template <class T>
BLOCKGATE_INLINE void margin_group(const TopK& spec, const T* scores, int64_t count,
                                   int64_t offset, Key<T>* keys, T* values, int64_t* indices) {
  const int64_t kept = spec.open_blocks;
  if (kept == count) {
    const Extremes found = find_extremes(scores, count, keys);
    const T threshold = open_threshold(spec, scores[found.lowest], scores[found.highest]);
    for (int64_t i = 0; i < count; ++i) {
      values[i] = scores[i] - threshold;
      indices[i] = offset + i;
    }
    return;
  }
  const KeyRange<Key<T>> range = make_ordered_keys<T>(scores, count, keys);
  int64_t next = pick<Key<T>>(keys, count, kept, range, keys + ceil_div(count, PANEL) * PANEL, indices);
  if (next < 0 || range.highest == KeyOf<T>::NAN_KEY) {
    // The keys have done their work; their memory holds the scores that are not kept.
    T* rest = reinterpret_cast<T*>(keys);
    __builtin_memcpy(rest, scores, count * sizeof(T));
    for (int64_t i = 0; i < kept; ++i) rest[indices[i]] = T(__builtin_nan(""));
    next = first_largest(rest, count);
  }
  // NaN is kept first: what is left and has no largest is all NaN.
  const T threshold = margin_threshold(spec, next < 0 ? T(__builtin_nan("")) : scores[next]);
  for (int64_t i = 0; i < kept; ++i) {
    values[i] = scores[indices[i]] - threshold;
    indices[i] += offset;
  }
}

// Writes the index of every group's runner-up to `runners`, and what its kept scores are measured
// from to `thresholds`. All groups step by step: what was just written is slow to read in another
// width. `rest` (spec.scores) is scratch.
template <class T>
BLOCKGATE_INLINE void find_runners(const TopK& spec, const T* scores, const int64_t* indices,
                                   T* rest, Key<T>* keys, T* thresholds, int64_t* runners) {
  const int64_t group = spec.scores / spec.groups;
  if (spec.open_blocks == group) {
    for (int64_t g = 0; g < spec.groups; ++g) {
      const T* mine = scores + g * group;
      const Extremes found = find_extremes(mine, group, keys);
      thresholds[g] = open_threshold(spec, mine[found.lowest], mine[found.highest]);
      runners[g] = g * group + found.lowest;
    }
    return;
  }
  __builtin_memcpy(rest, scores, spec.scores * sizeof(T));
  for (int64_t i = 0; i < spec.groups * spec.open_blocks; ++i)
    rest[indices[i]] = T(__builtin_nan(""));
  for (int64_t g = 0; g < spec.groups; ++g) {
    const int64_t best = first_largest(rest + g * group, group);
    runners[g] = g * group + larger(0, best);
    thresholds[g] = margin_threshold(spec, best < 0 ? T(__builtin_nan("")) : scores[runners[g]]);
  }
}

// Writes the index of every group's runner-up to `runners`: it has a gradient too.
template <class T>
void margin_backward(const TopK& spec, const T* grad_gates, const T* scores, const T* gates,
                     const int64_t* indices, T* grad_scores, int64_t* runners, T* scratch) {
  const int64_t group = spec.scores / spec.groups, kept = spec.open_blocks;
  T* const thresholds = scratch;
  Key<T>* const keys = reinterpret_cast<Key<T>*>(scratch + spec.groups);
  find_runners(spec, scores, indices, grad_scores, keys, thresholds, runners);
  __builtin_memset(grad_scores, 0, spec.scores * sizeof(T));
  const double unit = unit_of<T>(spec.groups * kept, [&](int64_t i) {
    return T(scores[indices[i]] - thresholds[i / kept]);
  });
  constexpr int PARTS = 4;
  double squares[PARTS] = {}, dots[PARTS] = {};
  for (int64_t g = 0; g < spec.groups; ++g) {
    const auto add = [&](int64_t i, int part) __attribute__((always_inline)) {
      const double value = T(scores[indices[i]] - thresholds[g]) * unit;
      squares[part] += value * value;
      dots[part] += double(grad_gates[i]) * double(gates[i]);
    };
    int64_t i = g * kept;
    for (; i + PARTS <= (g + 1) * kept; i += PARTS)
#pragma GCC unroll 4
      for (int part = 0; part < PARTS; ++part) add(i + part, part);
    for (; i < (g + 1) * kept; ++i) add(i, 0);
  }
  const double square = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  const double dot = (dots[0] + dots[1]) + (dots[2] + dots[3]);
  const double scale = square == 0 ? 0 : 1.0 / __builtin_sqrt(square / double(spec.scores));
  const double mean_dot = dot / double(spec.scores);
  for (int64_t g = 0; g < spec.groups; ++g) {
    double total = 0;
    for (int64_t i = g * kept; i < (g + 1) * kept; ++i) {
      const bool closed = scores[indices[i]] - thresholds[g] == 0;
      const double found = closed ? 0 : scale * (grad_gates[i] - gates[i] * mean_dot) * unit;
      grad_scores[indices[i]] = T(found);
      total += found;
    }
    grad_scores[runners[g]] -= T(total);
    if (kept == group && spec.normalise == Normalise::margin) {
      const double step = total / double(group);
      const int64_t highest = find_extremes(scores + g * group, group, keys).highest;
      grad_scores[g * group + highest] += T(step);
      grad_scores[runners[g]] -= T(step);
    }
  }
}

template <class T>
void select(const TopK& spec, int64_t group_begin, int64_t group_end, const T* scores, T* kept,
            int64_t* indices, T* scratch) {
  if (is_margin(spec.normalise))
    select_by(margin_group<T>, spec, group_begin, group_end, scores, kept, indices, scratch);
  else
    select_by(select_group<T>, spec, group_begin, group_end, scores, kept, indices, scratch);
}

template <class T>
void top_k_backward(const TopK& spec, const T* grad_gates, const T* scores, const T* gates,
                    const int64_t* indices, T* grad_scores, int64_t* runners, T* scratch) {
  if (is_margin(spec.normalise))
    margin_backward(spec, grad_gates, scores, gates, indices, grad_scores, runners, scratch);
  else
    relu_backward(spec, grad_gates, scores, gates, indices, grad_scores);
}

}  // namespace blockgate::BLOCKGATE_ISA
