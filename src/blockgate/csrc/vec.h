// Vectors of one instruction set, by the compiler's vector extensions.
//
// The including file names the set: BLOCKGATE_ISA (a namespace of its own, so that no function is
// ever merged with another set's copy), BLOCKGATE_VECTOR_BYTES, BLOCKGATE_ACCUMULATORS (how many
// vector registers a tile may hold while leaving room for its operands), and BLOCKGATE_X86 where
// the intrinsics of that vector length may be used (the compiler's own macros don't follow a
// target pragma everywhere).
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

// Stored forms of packed weights. bfloat16 is kept as its bits.
struct BFloat16 {
  uint16_t bits;
};

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

// Weights as T, converted on load.
BLOCKGATE_INLINE Vec<float> load_weight(const float* p) { return load(p); }
BLOCKGATE_INLINE Vec<double> load_weight(const double* p) { return load(p); }

// Widening by intrinsics where the extension's own conversions become a dozen instructions.
BLOCKGATE_INLINE Vec<float> load_weight(const BFloat16* p) {
#if BLOCKGATE_X86 && BLOCKGATE_VECTOR_BYTES == 64
  const auto bits = (Vec<uint32_t>)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif BLOCKGATE_X86 && BLOCKGATE_VECTOR_BYTES == 32
  const auto bits = (Vec<uint32_t>)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  typedef uint16_t Narrow __attribute__((vector_size(BLOCKGATE_VECTOR_BYTES / 2)));
  Narrow narrow;
  __builtin_memcpy(&narrow, p, sizeof narrow);
  const auto bits = __builtin_convertvector(narrow, Vec<uint32_t>);
#endif
  return (Vec<float>)(bits << 16);
}

// Halves added in a fixed tree, so that a sum never depends on tiles or threads.
template <class T>
BLOCKGATE_INLINE T horizontal_sum(Vec<T> v) {
  constexpr int L = LANES<T>;
  if constexpr (L == 16) v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  if constexpr (L == 16) v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
  if constexpr (L == 16) v += __builtin_shufflevector(v, v, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
  if constexpr (L == 8) v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  if constexpr (L == 8) v += __builtin_shufflevector(v, v, 2, 3, 2, 3, 2, 3, 2, 3);
  if constexpr (L == 4) v += __builtin_shufflevector(v, v, 2, 3, 2, 3);
  return v[0] + v[1];
}

}  // namespace blockgate::BLOCKGATE_ISA
