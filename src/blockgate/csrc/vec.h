// Vectors of one instruction set, by the compiler's vector extensions.
//
// The including file names the set: BLOCKGATE_ISA (a namespace of its own, so that no function is
// ever merged with another set's copy), BLOCKGATE_VECTOR_BYTES and BLOCKGATE_ACCUMULATORS (how
// many vector registers a tile may hold while leaving room for its operands).
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

BLOCKGATE_INLINE Vec<float> load_weight(const BFloat16* p) {
  typedef uint16_t Narrow __attribute__((vector_size(BLOCKGATE_VECTOR_BYTES / 2)));
  Narrow bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return (Vec<float>)(__builtin_convertvector(bits, Vec<uint32_t>) << 16);
}

// Intrinsics where the extension's own conversion from bytes becomes a dozen instructions.
BLOCKGATE_INLINE Vec<float> load_weight(const int8_t* p) {
  typedef int8_t Narrow __attribute__((vector_size(BLOCKGATE_VECTOR_BYTES / 4)));
  Narrow bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
#if BLOCKGATE_VECTOR_BYTES == 64
  const Vec<int32_t> wide = (Vec<int32_t>)_mm512_cvtepi8_epi32((__m128i)bytes);
#elif BLOCKGATE_VECTOR_BYTES == 32
  const Vec<int32_t> wide =
      (Vec<int32_t>)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  const Vec<int32_t> wide = __builtin_convertvector(bytes, Vec<int32_t>);
#endif
  return __builtin_convertvector(wide, Vec<float>);
}

// Fixed tree, so that a sum never depends on tiles or threads.
template <class T>
BLOCKGATE_INLINE T horizontal_sum(Vec<T> v) {
  T lanes[LANES<T>];
  store(lanes, v);
  for (int width = LANES<T> / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

}  // namespace blockgate::BLOCKGATE_ISA
