// Vector operations of AVX-512 (F, BW, DQ, VL): 32 registers of 16 floats. See vec.h for the list.
// With BLOCKGATE_VNNI, integer products and their sums are one instruction.
// The including file brings <immintrin.h>, before it names its target.
#pragma once

#if !defined(BLOCKGATE_ISA)
#define BLOCKGATE_ISA avx512
#endif
#define BLOCKGATE_VECTOR_BYTES 64
#define BLOCKGATE_ACCUMULATORS 24
#if defined(BLOCKGATE_VNNI)
#define BLOCKGATE_PAIR_CHAINS 4
#else
#define BLOCKGATE_PAIR_CHAINS 1
#endif
#include "isa/vec.h"

namespace blockgate::BLOCKGATE_ISA {

BLOCKGATE_INLINE Vec<uint32_t> widen(const uint16_t* p) {
  return (Vec<uint32_t>)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}

BLOCKGATE_INLINE Vec<float> load_halves(const uint16_t* p) {
  return (Vec<float>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}

BLOCKGATE_INLINE void widen(const uint8_t* p, PanelLanes& lanes) {
  lanes[0] = (Vec<uint32_t>)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}

BLOCKGATE_INLINE void widen(const int8_t* p, SignedLanes& lanes) {
  lanes[0] = (Vec<int32_t>)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}

BLOCKGATE_INLINE void widen_pairs(const int8_t* p, PanelPairs& pairs) {
  pairs[0] = (Vec<int16_t>)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
}

BLOCKGATE_INLINE Vec<int32_t> add_pairs(Vec<int32_t> sum, Vec<int16_t> a, Vec<int16_t> b) {
#if defined(BLOCKGATE_VNNI)
  return (Vec<int32_t>)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
  return sum + (Vec<int32_t>)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
}

BLOCKGATE_INLINE Vec<int16_t> multiply_bytes(Vec<uint8_t> a, Vec<int8_t> b) {
  return (Vec<int16_t>)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
}

#if defined(BLOCKGATE_VNNI)
// Of two rows of pairs, the quads of each output: see quads.h.
BLOCKGATE_INLINE Vec<int8_t> quads_of_pairs(Vec<int8_t> pairs) {
  typedef int16_t Words __attribute__((vector_size(64)));
  const auto words = (Words)pairs;
  return (Vec<int8_t>)__builtin_shufflevector(words, words, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                              6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                              13, 29, 14, 30, 15, 31);
}

// A sum and four products added in each 32-bit lane.
BLOCKGATE_INLINE Vec<int32_t> add_quads(Vec<int32_t> sum, Vec<uint8_t> a, Vec<int8_t> b) {
  return (Vec<int32_t>)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}
#endif

template <int BYTES>
BLOCKGATE_INLINE Vec<float> repeat(const void* p) {
  if constexpr (BYTES == 16) return (Vec<float>)_mm512_broadcast_f32x4(_mm_loadu_ps((const float*)p));
  else return (Vec<float>)_mm512_broadcast_f32x8(_mm256_loadu_ps((const float*)p));
}

BLOCKGATE_INLINE Vec<float> load_first(const float* p, int64_t count) {
  return (Vec<float>)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
}

BLOCKGATE_INLINE Vec<double> load_first(const double* p, int64_t count) {
  return (Vec<double>)_mm512_maskz_loadu_pd(__mmask8((1u << count) - 1), p);
}

BLOCKGATE_INLINE uint64_t sign_bits(Vec<int32_t> v) { return _mm512_movepi32_mask((__m512i)v); }

BLOCKGATE_INLINE uint64_t sign_bits(Vec<int64_t> v) { return _mm512_movepi64_mask((__m512i)v); }

template <class T>
BLOCKGATE_INLINE void transpose(Vec<T> (&rows)[LANES<T>]) {
  transpose_by_rounds<T>(rows);
}

}  // namespace blockgate::BLOCKGATE_ISA
