// Vector operations of AVX2 with FMA: 16 registers of 8 floats. See vec.h for the list.
// The including file brings <immintrin.h>, before it names its target.
#pragma once

#define BLOCKGATE_ISA avx2
#define BLOCKGATE_VECTOR_BYTES 32
#define BLOCKGATE_ACCUMULATORS 12
#define BLOCKGATE_PAIR_CHAINS 1
#include "isa/vec.h"

namespace blockgate::BLOCKGATE_ISA {

BLOCKGATE_INLINE Vec<uint32_t> widen(const uint16_t* p) {
  return (Vec<uint32_t>)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
}

// F16C, which every machine with AVX2 has.
BLOCKGATE_INLINE Vec<float> load_halves(const uint16_t* p) {
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}

BLOCKGATE_INLINE void widen(const uint8_t* p, PanelLanes& lanes) {
  lanes[0] = (Vec<uint32_t>)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  lanes[1] = (Vec<uint32_t>)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)));
}

BLOCKGATE_INLINE void widen(const int8_t* p, SignedLanes& lanes) {
  lanes[0] = (Vec<int32_t>)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
  lanes[1] = (Vec<int32_t>)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)));
}

BLOCKGATE_INLINE void widen_pairs(const int8_t* p, PanelPairs& pairs) {
  pairs[0] = (Vec<int16_t>)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  pairs[1] = (Vec<int16_t>)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)));
}

BLOCKGATE_INLINE Vec<int32_t> add_pairs(Vec<int32_t> sum, Vec<int16_t> a, Vec<int16_t> b) {
  return sum + (Vec<int32_t>)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}

BLOCKGATE_INLINE Vec<int16_t> multiply_bytes(Vec<uint8_t> a, Vec<int8_t> b) {
  return (Vec<int16_t>)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
}

template <int BYTES>
BLOCKGATE_INLINE Vec<float> repeat(const void* p) {
  static_assert(BYTES == 16);
  return (Vec<float>)_mm256_broadcast_ps((const __m128*)p);
}

BLOCKGATE_INLINE Vec<float> load_first(const float* p, int64_t count) {
  const Vec<int32_t> wanted = lane_numbers<int32_t>() < broadcast_key(int32_t(count));
  return (Vec<float>)_mm256_maskload_ps(p, (__m256i)wanted);
}

BLOCKGATE_INLINE Vec<double> load_first(const double* p, int64_t count) {
  const Vec<int64_t> wanted = lane_numbers<int64_t>() < broadcast_key(count);
  return (Vec<double>)_mm256_maskload_pd(p, (__m256i)wanted);
}

BLOCKGATE_INLINE uint64_t sign_bits(Vec<int32_t> v) {
  return uint64_t(_mm256_movemask_ps((__m256)v));
}

BLOCKGATE_INLINE uint64_t sign_bits(Vec<int64_t> v) {
  return uint64_t(_mm256_movemask_pd((__m256d)v));
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
