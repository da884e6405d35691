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

// Keys of `count` scores, padded to whole vectors with `pad`, which is less than any of them.
template <class T, class KeysOf>
BLOCKGATE_INLINE KeyRange<Key<T>> write_keys(const T* scores, int64_t count, Key<T> pad,
                                             const KeysOf& keys_of, Key<T>* keys) {
  using K = Key<T>;
  constexpr int L = LANES<T>;
  const Vec<K> padding = broadcast_key(pad), most = broadcast_key<K>(KeyOf<T>::NAN_KEY);
  Vec<K> lowest = most, highest = padding;
  int64_t i = 0;
  for (; i + L <= count; i += L) {
    const Vec<K> key = keys_of(load(scores + i));
    lowest = key < lowest ? key : lowest;
    highest = key > highest ? key : highest;
    store(keys + i, key);
  }
  if (i < count) {
    const Vec<K> real = lane_numbers<K>() < broadcast_key(K(count - i));
    const Vec<K> key = keys_of(load_first(scores + i, count - i));
    const Vec<K> low = real ? key : most, high = real ? key : padding;
    lowest = low < lowest ? low : lowest;
    highest = high > highest ? high : highest;
    store(keys + i, high);
  }
  return {horizontal_least<K>(lowest), horizontal_largest<K>(highest)};
}

// Keys of `count` scores, padded to whole vectors with -1, which no threshold counts.
template <class T>
BLOCKGATE_INLINE KeyRange<Key<T>> make_keys(const T* scores, int64_t count, Key<T>* keys) {
  using K = Key<T>;
  return write_keys<T>(scores, count, -1, [](Vec<T> s) __attribute__((always_inline)) {
    const Vec<K> is_nan = s != s;
    return ((Vec<K>)s & (s > Vec<T>{})) | (broadcast_key<K>(KeyOf<T>::NAN_KEY) & is_nan);
  }, keys);
}

// How many keys one number has a bit for.
inline constexpr int64_t BITS = 64;

// One bit for each of at most BITS keys, set where test(keys of a vector) holds.
template <class K, class Test>
BLOCKGATE_INLINE uint64_t bits_where(const K* keys, int64_t count, const Test& test) {
  constexpr int L = LANES<K>;
  uint64_t bits = 0;
  for (int64_t i = 0; i < count; i += L) bits |= sign_bits(Vec<K>(test(load(keys + i)))) << i;
  return bits;
}

template <class K>
BLOCKGATE_INLINE int64_t count_at_least(const K* keys, int64_t count, K threshold) {
  constexpr int L = LANES<K>;
  const Vec<K> limit = broadcast_key<K>(threshold);
  if (count <= BITS)
    return __builtin_popcountll(
        bits_where(keys, count, [&](Vec<K> k) __attribute__((always_inline)) { return k >= limit; }));
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

// ranks[i]: how many keys are larger than key i.
template <class K>
BLOCKGATE_INLINE void rank_keys(const K* keys, int64_t count, K* ranks) {
  constexpr int L = LANES<K>;
  for (int64_t i = 0; i < count; i += L) {
    const Vec<K> mine = load(keys + i);
    Vec<K> rank{};
    for (int64_t j = 0; j < count; ++j) rank -= broadcast_key<K>(keys[j]) > mine;
    store(ranks + i, rank);
  }
}

// Indices of the kept keys, ascending. Returns that of the largest key that is not kept, if it was
// found on the way, else -1.
template <class K>
BLOCKGATE_INLINE int64_t pick(const K* keys, int64_t count, int64_t kept, KeyRange<K> range,
                              K* ranks, int64_t* indices) {
  int64_t place = 0;
  if (kept == count) {
    for (int64_t i = 0; i < count; ++i) indices[i] = i;
    return -1;
  }
  const auto take = [&](int64_t first, uint64_t bits) __attribute__((always_inline)) {
    for (; bits; bits &= bits - 1) indices[place++] = first + __builtin_ctzll(bits);
  };
  if (count <= RANKED_SCORES<K>) {
    rank_keys(keys, count, ranks);
    const Vec<K> limit = broadcast_key(K(kept));
    const auto where = [&](const auto& test) { return bits_where(ranks, count, test); };
    const uint64_t chosen = where([&](Vec<K> r) { return r < limit; });
    // Else equal keys share a rank across the limit.
    if (__builtin_popcountll(chosen) == kept) {
      take(0, chosen);
      return __builtin_ctzll(where([&](Vec<K> r) { return r == limit; }));
    }
  }
  Threshold<K> threshold = find_threshold<K>(keys, count, kept, range);
  const Vec<K> value = broadcast_key(threshold.value);
  for (int64_t first = 0; first < count; first += BITS) {
    const auto where = [&](const auto& test) {
      return bits_where(keys + first, smaller(BITS, count - first), test);
    };
    uint64_t chosen = where([&](Vec<K> k) { return k > value; });
    if (threshold.ties > 0)
      for (uint64_t equal = where([&](Vec<K> k) { return k == value; });
           equal && threshold.ties > 0; equal &= equal - 1, --threshold.ties)
        chosen |= equal & -equal;
    take(first, chosen);
  }
  return -1;
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

// A power of two by which values are multiplied before they are squared, so that squares neither
// overflow nor vanish. 1 for float, whose squares always fit a double, and for doubles of usual size.
template <class T>
BLOCKGATE_INLINE double unit_for(T largest) {
  if constexpr (sizeof(T) == 8)
    if (largest > 0 && largest < __builtin_inf() && (largest < 0x1p-400 || largest > 0x1p400))
      return largest < 1 ? 0x1p700 : 0x1p-700;
  return 1;
}

// `value(i)` for the i of `count` kept scores.
template <class T, class Value>
BLOCKGATE_INLINE double unit_of(int64_t count, const Value& value) {
  T largest = 0;
  if constexpr (sizeof(T) == 8)
    for (int64_t i = 0; i < count; ++i) largest = value(i) > largest ? value(i) : largest;
  return unit_for(largest);
}

struct Moments {
  double sum, squares;
};

// Sums over the kept scores in double, times `unit`, in eight fixed partial sums.
template <class T>
BLOCKGATE_INLINE Moments moments(const T* values, int64_t count, double unit) {
  double sum[8] = {}, squares[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (int j = 0; j < 8; ++j) {
      const double v = values[i + j] * unit;
      sum[j] += v;
      squares[j] += v * v;
    }
  for (int j = 0; i < count; ++i, ++j) {
    const double v = values[i] * unit;
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

// `select_one` selects in one group: select_group, or another that keeps other values.
template <class T, class Select>
BLOCKGATE_INLINE void select_by(const Select& select_one, const TopK& spec, int64_t group_begin,
                                int64_t group_end, const T* scores, T* kept, int64_t* indices,
                                T* scratch) {
  const int64_t group = spec.scores / spec.groups;
  Key<T>* keys = reinterpret_cast<Key<T>*>(scratch);
  for (int64_t g = group_begin; g < group_end; ++g)
    select_one(spec, scores + g * group, group, g * group, keys, kept + g * spec.open_blocks,
               indices + g * spec.open_blocks);
}

template <class T>
void normalise(const TopK& spec, T* gates) {
  if (spec.normalise == Normalise::none) return;
  const int64_t kept = spec.groups * spec.open_blocks;
  const double unit = unit_of<T>(kept, [&](int64_t i) { return gates[i]; });
  const double scale = gate_scale(moments(gates, kept, unit), spec.scores, spec.normalise);
  for (int64_t i = 0; i < kept; ++i) gates[i] = T(gates[i] * unit * scale);
}

template <class T>
BLOCKGATE_INLINE void relu_backward(const TopK& spec, const T* grad_gates, const T* scores,
                                    const T* gates, const int64_t* indices, T* grad_scores) {
  const int64_t kept = spec.groups * spec.open_blocks;
  __builtin_memset(grad_scores, 0, spec.scores * sizeof(T));
  double sum[4] = {}, squares[4] = {}, dot[4] = {};
  const double unit = spec.normalise == Normalise::none
                          ? 1
                          : unit_of<T>(kept, [&](int64_t i) { return scores[indices[i]]; });
  const auto add = [&](int64_t i, int lane) {
    const T score = scores[indices[i]];
    const double v = (score <= 0 ? T(0) : score) * unit;
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
    grad_scores[indices[i]] = T(scale * (grad_gates[i] - shift) * unit);
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
