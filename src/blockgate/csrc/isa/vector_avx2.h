// Vector operations of AVX2 with FMA: 16 registers of 8 floats. See vec.h for the list.
// The including file brings <immintrin.h>, before it names its target.
#pragma once

#define BLOCKGATE_ISA avx2
#define BLOCKGATE_VECTOR_BYTES 32
#define BLOCKGATE_ACCUMULATORS 12
#include "isa/vec.h"

namespace blockgate::BLOCKGATE_ISA {

BLOCKGATE_INLINE Vec<uint32_t> widen(const uint16_t* p) {
  return (Vec<uint32_t>)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
}

BLOCKGATE_INLINE void widen(const uint8_t* p, PanelLanes& lanes) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  const __m128i ordered = _mm_shuffle_epi32(bytes, _MM_SHUFFLE(3, 1, 2, 0));
  lanes[0] = (Vec<uint32_t>)_mm256_cvtepu8_epi32(ordered);
  lanes[1] = (Vec<uint32_t>)_mm256_cvtepu8_epi32(_mm_srli_si128(ordered, 8));
}

// Widening comes first, since it is cheapest while loading; interleaving then works within halves
// of a vector, so the outputs come as 0-3, 8-11 and 4-7, 12-15.
BLOCKGATE_INLINE void interleave(const int8_t* first, const int8_t* second, PanelPairs& pairs) {
  const __m256i a = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)first));
  const __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)second));
  pairs[0] = (Vec<int16_t>)_mm256_unpacklo_epi16(a, b);
  pairs[1] = (Vec<int16_t>)_mm256_unpackhi_epi16(a, b);
}

BLOCKGATE_INLINE Vec<int32_t> multiply_pairs(Vec<int16_t> a, Vec<int16_t> b) {
  return (Vec<int32_t>)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}

template <int BYTES>
BLOCKGATE_INLINE Vec<float> repeat(const void* p) {
  static_assert(BYTES == 16);
  return (Vec<float>)_mm256_broadcast_ps((const __m128*)p);
}

BLOCKGATE_INLINE void in_order(Vec<int32_t>* panel) {
  const auto low = (__m256i)panel[0], high = (__m256i)panel[1];
  panel[0] = (Vec<int32_t>)_mm256_permute2x128_si256(low, high, 0x20);
  panel[1] = (Vec<int32_t>)_mm256_permute2x128_si256(low, high, 0x31);
}

// AVX2 shuffles cheaply only inside 128-bit halves: pairs, then quads there, then the halves.
BLOCKGATE_INLINE void transpose_eight(Vec<float> (&r)[8]) {
  Vec<float> pair[8], quad[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pair[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pair[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int h = 0; h < 8; h += 4)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Vec<float> a = pair[h + i], b = pair[h + i + 2];
      quad[h + 2 * i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
      quad[h + 2 * i + 1] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = __builtin_shufflevector(quad[i], quad[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = __builtin_shufflevector(quad[i], quad[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

template <class T>
BLOCKGATE_INLINE void transpose(Vec<T> (&rows)[LANES<T>]) {
  if constexpr (sizeof(T) == sizeof(float)) transpose_eight(rows);
  else transpose_by_rounds<T>(rows);
}

}  // namespace blockgate::BLOCKGATE_ISA
