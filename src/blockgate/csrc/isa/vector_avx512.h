// Vector operations of AVX-512 (F, BW, DQ, VL): 32 registers of 16 floats. See vec.h for the list.
// The including file brings <immintrin.h>, before it names its target.
#pragma once

#define BLOCKGATE_ISA avx512
#define BLOCKGATE_VECTOR_BYTES 64
#define BLOCKGATE_ACCUMULATORS 24
#include "isa/vec.h"

namespace blockgate::BLOCKGATE_ISA {

BLOCKGATE_INLINE Vec<uint32_t> widen(const uint16_t* p) {
  return (Vec<uint32_t>)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}

BLOCKGATE_INLINE void widen(const uint8_t* p, PanelLanes& lanes) {
  lanes[0] = (Vec<uint32_t>)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}

BLOCKGATE_INLINE void interleave(const int8_t* first, const int8_t* second, PanelPairs& pairs) {
  const __m128i a = _mm_loadu_si128((const __m128i*)first);
  const __m128i b = _mm_loadu_si128((const __m128i*)second);
  pairs[0] = (Vec<int16_t>)_mm512_cvtepi8_epi16(
      _mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
}

BLOCKGATE_INLINE Vec<int32_t> multiply_pairs(Vec<int16_t> a, Vec<int16_t> b) {
  return (Vec<int32_t>)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}

template <int BYTES>
BLOCKGATE_INLINE Vec<float> repeat(const void* p) {
  if constexpr (BYTES == 16) return (Vec<float>)_mm512_broadcast_f32x4(_mm_loadu_ps((const float*)p));
  else return (Vec<float>)_mm512_broadcast_f32x8(_mm256_loadu_ps((const float*)p));
}

BLOCKGATE_INLINE void in_order(Vec<int32_t>*) {}

template <class T>
BLOCKGATE_INLINE void transpose(Vec<T> (&rows)[LANES<T>]) {
  transpose_by_rounds<T>(rows);
}

}  // namespace blockgate::BLOCKGATE_ISA
