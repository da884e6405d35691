// Top-k with normalisation, for one row of scores, and its gradient.
//
// Selection works on integer keys that order like the scores after ReLU: 0 for anything not
// positive, the float's own bits for a positive score, and one key above infinity for NaN. The
// k-th largest key is found by bisection on the bits: each step is a branch-free count.
#pragma once

#include "isa/vec.h"

namespace blockgate::BLOCKGATE_ISA {

template <class T>
struct KeyOf;
template <>
struct KeyOf<float> {
  using type = int32_t;
  static constexpr type NAN_KEY = 0x7f800001;
};
template <>
struct KeyOf<double> {
  using type = int64_t;
  static constexpr type NAN_KEY = 0x7ff0000000000001;
};
template <class T>
using Key = typename KeyOf<T>::type;

template <class K>
struct KeyRange {
  K lowest, highest;
};

// Keys of `count` scores, padded to whole vectors with -1, which no threshold counts.
template <class T>
BLOCKGATE_INLINE KeyRange<Key<T>> make_keys(const T* scores, int64_t count, Key<T>* keys) {
  using K = Key<T>;
  constexpr int L = LANES<T>;
  Vec<K> lowest = broadcast_key<K>(KeyOf<T>::NAN_KEY), highest{};
  for (int64_t i = 0; i < count; i += L) {
    Vec<T> s;
    if (i + L <= count) {
      s = load(scores + i);
    } else {
      T edge[L] = {};
      __builtin_memcpy(edge, scores + i, (count - i) * sizeof(T));
      s = load(edge);
    }
    const Vec<K> bits = (Vec<K>)s;
    const Vec<K> is_nan = s != s;
    Vec<K> key = (bits & (s > Vec<T>{})) | (broadcast_key<K>(KeyOf<T>::NAN_KEY) & is_nan);
    lowest = key < lowest ? key : lowest;
    highest = key > highest ? key : highest;
    store(keys + i, key);
  }
  for (int64_t i = count; i < ceil_div(count, L) * L; ++i) keys[i] = -1;
  KeyRange<K> range{lowest[0], highest[0]};
  for (int j = 1; j < L; ++j) {
    if (lowest[j] < range.lowest) range.lowest = lowest[j];
    if (highest[j] > range.highest) range.highest = highest[j];
  }
  return range;
}

template <class K>
BLOCKGATE_INLINE int64_t count_at_least(const K* keys, int64_t count, K threshold) {
  constexpr int L = LANES<K>;
  const Vec<K> limit = broadcast_key<K>(threshold);
  Vec<K> below{}, below2{};
  int64_t i = 0;
  for (; i + 2 * L <= count; i += 2 * L) {
    below += load(keys + i) < limit;
    below2 += load(keys + i + L) < limit;
  }
  for (; i < count; i += L) below += load(keys + i) < limit;
  // A true comparison is -1. Padding keys are below every threshold.
  return ceil_div(count, L) * L + horizontal_sum<K>(below + below2);
}

// Keys above `value` are kept, and of those equal to it the first `ties`.
template <class K>
struct Threshold {
  K value;
  int64_t ties;
};

template <class K>
BLOCKGATE_INLINE Threshold<K> find_threshold(const K* keys, int64_t count, int64_t kept,
                                             KeyRange<K> range) {
  // Invariant: at least `kept` keys are >= low; fewer, namely `above`, are >= high. No key is the
  // highest there is, and differences are taken in more bits than keys have, or in halves.
  K low = range.lowest, high = range.highest + 1;
  int64_t above = 0;
  if (low == 0 && high > 1) {
    // Scores that are not positive are common: see at once whether the choice is among them.
    const int64_t positive = count_at_least<K>(keys, count, 1);
    if (positive >= kept) {
      low = 1;
    } else {
      high = 1;
      above = positive;
    }
  }
  while (low + 1 < high) {
    // The mean, rounded down, of numbers whose difference may not fit.
    const K middle = (low & high) + ((low ^ high) >> 1);
    const int64_t found = count_at_least<K>(keys, count, middle);
    if (found == kept) return {K(middle - 1), 0};
    if (found > kept) {
      low = middle;
    } else {
      high = middle;
      above = found;
    }
  }
  return {low, kept - above};
}

// Largest group that is ranked instead of searched: a few vectors, as rows of blocks often are.
template <class T>
inline constexpr int64_t RANKED_SCORES = 2 * LANES<T>;

// ranks[i]: how many keys come before key i, larger ones and equal ones of a lower index.
template <class K>
BLOCKGATE_INLINE void rank_keys(const K* keys, int64_t count, K* ranks) {
  constexpr int L = LANES<K>;
  Vec<K> lane;
  for (int j = 0; j < L; ++j) lane[j] = j;
  for (int64_t i = 0; i < count; i += L) {
    const Vec<K> mine = load(keys + i), place = lane + broadcast_key<K>(i);
    Vec<K> rank{};
    for (int64_t j = 0; j < count; ++j)
      // Where j comes first, a tie counts: key j >= mine is key j > mine - 1.
      rank -= broadcast_key<K>(keys[j]) > mine + (place > broadcast_key<K>(j));
    store(ranks + i, rank);
  }
}

// Indices of the kept keys, ascending. Branch-free: every candidate is written and the place
// moves on only if it is kept.
template <class K>
BLOCKGATE_INLINE void pick(const K* keys, int64_t count, int64_t kept, KeyRange<K> range,
                           K* ranks, int64_t* indices) {
  int64_t place = 0;
  if (kept == count) {
    for (int64_t i = 0; i < count; ++i) indices[i] = i;
    return;
  }
  if (count <= RANKED_SCORES<K>) {
    rank_keys(keys, count, ranks);
    for (int64_t i = 0; place < kept; ++i) {
      indices[place] = i;
      place += ranks[i] < kept;
    }
    return;
  }
  const Threshold<K> threshold = find_threshold<K>(keys, count, kept, range);
  int64_t ties = threshold.ties;
  if (ties == 0) {
    for (int64_t i = 0; place < kept; ++i) {
      indices[place] = i;
      place += keys[i] > threshold.value;
    }
    return;
  }
  for (int64_t i = 0; place < kept; ++i) {
    const bool tie = keys[i] == threshold.value;
    indices[place] = i;
    place += (keys[i] > threshold.value) | (tie & (ties > 0));
    ties -= tie;
  }
}

template <class T>
BLOCKGATE_INLINE void select_group(const TopK& spec, const T* scores, int64_t count,
                                   int64_t offset, Key<T>* keys, T* values, int64_t* indices) {
  const int64_t kept = spec.open_blocks;
  const KeyRange<Key<T>> range = make_keys<T>(scores, count, keys);
  pick<Key<T>>(keys, count, kept, range, keys + ceil_div(count, PANEL) * PANEL, indices);
  for (int64_t i = 0; i < kept; ++i) {
    const T score = scores[indices[i]];
    values[i] = score <= 0 ? T(0) : score;
    indices[i] += offset;
  }
}

struct Moments {
  double sum, squares;
};

// Sums over the kept scores in double, in eight fixed partial sums.
template <class T>
BLOCKGATE_INLINE Moments moments(const T* values, int64_t count) {
  double sum[8] = {}, squares[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (int j = 0; j < 8; ++j) {
      const double v = values[i + j];
      sum[j] += v;
      squares[j] += v * v;
    }
  for (int j = 0; i < count; ++i, ++j) {
    const double v = values[i];
    sum[j] += v;
    squares[j] += v * v;
  }
  Moments m{0, 0};
  for (int j = 0; j < 8; ++j) {
    m.sum += sum[j];
    m.squares += squares[j];
  }
  return m;
}

// gate = scale * score. 0 when every kept score is 0: all gates are closed then.
BLOCKGATE_INLINE double gate_scale(const Moments& m, int64_t scores, Normalise normalise) {
  if (m.sum == 0) return 0;
  switch (normalise) {
    case Normalise::mean: return double(scores) / m.sum;
    case Normalise::margin:
    case Normalise::margin_near_dense:
    case Normalise::rms: return 1.0 / __builtin_sqrt(m.squares / double(scores));
    default: return 1;
  }
}

// `select` selects in one group: select_group, or another that keeps other values.
template <class T, class Select>
BLOCKGATE_INLINE void top_k_by(const Select& select, const TopK& spec, const T* scores, T* gates,
                               int64_t* indices, T* scratch) {
  const int64_t group = spec.scores / spec.groups;
  Key<T>* keys = reinterpret_cast<Key<T>*>(scratch);
  for (int64_t g = 0; g < spec.groups; ++g)
    select(spec, scores + g * group, group, g * group, keys,
           gates + g * spec.open_blocks, indices + g * spec.open_blocks);
  if (spec.normalise == Normalise::none) return;
  const int64_t kept = spec.groups * spec.open_blocks;
  const double scale = gate_scale(moments(gates, kept), spec.scores, spec.normalise);
  for (int64_t i = 0; i < kept; ++i) gates[i] = T(gates[i] * scale);
}

template <class T>
BLOCKGATE_INLINE void relu_backward(const TopK& spec, const T* grad_gates, const T* scores,
                                    const T* gates, const int64_t* indices, T* grad_scores) {
  const int64_t kept = spec.groups * spec.open_blocks;
  double sum[4] = {}, squares[4] = {}, dot[4] = {};
  const auto add = [&](int64_t i, int lane) {
    const T score = scores[indices[i]];
    const double v = score <= 0 ? T(0) : score;
    sum[lane] += v;
    squares[lane] += v * v;
    dot[lane] += double(grad_gates[i]) * double(gates[i]);
  };
  int64_t done = 0;
  for (; done + 4 <= kept; done += 4) {
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; ++lane) add(done + lane, lane);
  }
  for (; done < kept; ++done) add(done, 0);
  const Moments m{(sum[0] + sum[1]) + (sum[2] + sum[3]),
                  (squares[0] + squares[1]) + (squares[2] + squares[3])};
  const double gate_dot = (dot[0] + dot[1]) + (dot[2] + dot[3]);
  const double scale = gate_scale(m, spec.scores, spec.normalise);
  const double mean_dot = spec.normalise == Normalise::none ? 0 : gate_dot / double(spec.scores);
  for (int64_t i = 0; i < kept; ++i) {
    if (scores[indices[i]] <= 0) continue;
    const double shift = spec.normalise == Normalise::rms ? gates[i] * mean_dot : mean_dot;
    grad_scores[indices[i]] = T(scale * (grad_gates[i] - shift));
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
