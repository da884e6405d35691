// Vectors of one instruction set, by the compiler's vector extensions.
//
// The header of an instruction set (vector_avx512.h and its like) includes this one, after naming
// the set: BLOCKGATE_ISA (a namespace of its own, so that no function is ever merged with another
// set's copy), BLOCKGATE_VECTOR_BYTES, BLOCKGATE_ACCUMULATORS (how many vector registers a tile may
// hold while leaving room for its operands) and BLOCKGATE_PAIR_CHAINS (how many add_pairs must run
// side by side to hide what one takes). It then adds the few operations for which the
// compiler's extensions become poor code, the same ones in every set:
//
//   widen           16-bit values to 32 bits, while loading; a panel of bytes to 32 bits,
//                   with their sign where they have one
//   load_halves     16-bit floats to float, while loading
//   widen_pairs     32 bytes, the pairs of a panel, widened to int16 (see PanelPairs)
//   add_pairs       a sum and two products added in each 32-bit lane
//   multiply_bytes  two products of an unsigned and a signed byte and their sum in each 16-bit lane;
//                   sums that fit, since machines differ in what they make of others
//   transpose       a square of vectors
//   repeat          16 or 32 bytes that fill a vector, repeated while loading
//   load_first      the first few lanes from memory, reading no further, and 0 in the others
//   sign_bits       the sign of every lane of integers, as bits of one number
//
// Every other header of this folder is written in terms of these and knows no instruction set.
#pragma once

#include "kernels.h"

#define BLOCKGATE_INLINE inline __attribute__((always_inline))

namespace blockgate::BLOCKGATE_ISA {

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(BLOCKGATE_VECTOR_BYTES)));
};
template <class T>
using Vec = typename VectorOf<T>::type;

template <class T>
inline constexpr int LANES = BLOCKGATE_VECTOR_BYTES / sizeof(T);
// Vectors that hold one panel.
template <class T>
inline constexpr int PANEL_VECTORS = PANEL / LANES<T>;

// Fewer values than a vector holds.
template <class T, int COUNT>
struct PartOf {
  typedef T type __attribute__((vector_size(COUNT * sizeof(T))));
};
template <class T>
struct PartOf<T, 1> {
  typedef T type;
};
template <class T, int COUNT>
using Part = typename PartOf<T, COUNT>::type;

// x - 0 is x for every x, -0 and NaN included, so this is a plain broadcast.
template <class T>
BLOCKGATE_INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}

// Also right for integers, where there is no such subtlety.
template <class K>
BLOCKGATE_INLINE Vec<K> broadcast_key(K key) {
  return key + Vec<K>{};
}

template <class T>
BLOCKGATE_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
BLOCKGATE_INLINE void store(T* p, Vec<T> v) {
  __builtin_memcpy(p, &v, sizeof v);
}

// The one multiply-add of the engine. One expression, so that compilers contract it to a fused
// multiply-add wherever the target has one, in vector and scalar code alike: the same bits.
template <class V>
BLOCKGATE_INLINE V multiply_add(V a, V b, V c) {
  return a * b + c;
}

// Pairs of int16 for one panel: output o has its weights of two consecutive k in one 32-bit lane.
inline constexpr int PAIR_VECTORS = PANEL_VECTORS<int32_t>;
using PanelPairs = Vec<int16_t>[PAIR_VECTORS];
using PanelLanes = Vec<uint32_t>[PAIR_VECTORS];
using SignedLanes = Vec<int32_t>[PAIR_VECTORS];

// Halves joined in a fixed tree, so that a result never depends on tiles or threads.
template <class T, class Join>
BLOCKGATE_INLINE T join_lanes(Vec<T> v, const Join& join) {
  constexpr int L = LANES<T>;
  if constexpr (L == 16) v = join(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  if constexpr (L == 16) v = join(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7));
  if constexpr (L == 16) v = join(v, __builtin_shufflevector(v, v, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3));
  if constexpr (L == 8) v = join(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  if constexpr (L == 8) v = join(v, __builtin_shufflevector(v, v, 2, 3, 2, 3, 2, 3, 2, 3));
  if constexpr (L == 4) v = join(v, __builtin_shufflevector(v, v, 2, 3, 2, 3));
  return join(v[0], v[1]);
}

template <class T>
BLOCKGATE_INLINE T horizontal_sum(Vec<T> v) {
  return join_lanes<T>(v, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}

template <class T>
BLOCKGATE_INLINE T horizontal_least(Vec<T> v) {
  return join_lanes<T>(v, [](auto a, auto b) __attribute__((always_inline)) { return a < b ? a : b; });
}

template <class T>
BLOCKGATE_INLINE T horizontal_largest(Vec<T> v) {
  return join_lanes<T>(v, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}

// 0, 1, 2 ...
template <class K>
BLOCKGATE_INLINE Vec<K> lane_numbers() {
  Vec<K> lane{};
  for (int j = 0; j < LANES<K>; ++j) lane[j] = j;
  return lane;
}

// One round of interleaving two vectors, low halves then high halves.
template <class T>
BLOCKGATE_INLINE void interleave_lanes(Vec<T> a, Vec<T> b, Vec<T>& low, Vec<T>& high) {
  if constexpr (LANES<T> == 2) {
    low = __builtin_shufflevector(a, b, 0, 2);
    high = __builtin_shufflevector(a, b, 1, 3);
  } else if constexpr (LANES<T> == 4) {
    low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  } else if constexpr (LANES<T> == 8) {
    low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  } else {
    low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                   31);
  }
}

// rows[i] becomes column i: log2(LANES) rounds of interleaving row i with row i + LANES / 2.
template <class T>
BLOCKGATE_INLINE void transpose_by_rounds(Vec<T> (&rows)[LANES<T>]) {
  constexpr int L = LANES<T>;
#pragma GCC unroll 4
  for (int round = 1; round < L; round *= 2) {
    Vec<T> next[L];
#pragma GCC unroll 16
    for (int i = 0; i < L / 2; ++i)
      interleave_lanes<T>(rows[i], rows[i + L / 2], next[2 * i], next[2 * i + 1]);
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) rows[i] = next[i];
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
