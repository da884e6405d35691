// Vector operations of what every machine of the architecture has: SSE2 on x86-64, NEON on ARM64.
// See vec.h for the list. Only the compiler's extensions, but for one instruction of SSE2.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define BLOCKGATE_ISA baseline
#define BLOCKGATE_VECTOR_BYTES 16
#if defined(__aarch64__)
#define BLOCKGATE_ACCUMULATORS 24
#else
#define BLOCKGATE_ACCUMULATORS 12
#endif
#define BLOCKGATE_PAIR_CHAINS 1
#include "isa/vec.h"

namespace blockgate::BLOCKGATE_ISA {

BLOCKGATE_INLINE Vec<uint32_t> widen(const uint16_t* p) {
  typedef uint16_t Narrow __attribute__((vector_size(8)));
  Narrow narrow;
  __builtin_memcpy(&narrow, p, sizeof narrow);
  return __builtin_convertvector(narrow, Vec<uint32_t>);
}

BLOCKGATE_INLINE Vec<float> load_halves(const uint16_t* p) {
  const Vec<uint32_t> half = widen(p);
  const Vec<uint32_t> sign = (half & 0x8000) << 16, magnitude = (half & 0x7fff) << 13;
  const auto exponent = magnitude & 0x0f800000;
  // The exponent counts from 15 there and from 127 here; that of inf and NaN is the largest.
  const auto whole = magnitude + (112u << 23) + ((Vec<uint32_t>)(exponent == 0x0f800000) & (112u << 23));
  // A small number is a fraction of 2^-14: no denormal arises on the way, which some threads take for 0.
  const auto small = (Vec<float>)(magnitude + (113u << 23)) - 0x1p-14f;
  const auto is_small = (Vec<uint32_t>)(exponent == 0);
  return (Vec<float>)(((Vec<uint32_t>)small & is_small) | (whole & ~is_small) | sign);
}

BLOCKGATE_INLINE void widen(const uint8_t* p, PanelLanes& lanes) {
  const Vec<uint8_t> bytes = load(p), none{};
  // A byte before zeros is the widened byte: all machines of this set are little-endian.
  const auto low = (Vec<uint16_t>)__builtin_shufflevector(bytes, none, 0, 16, 1, 17, 2, 18, 3, 19,
                                                          4, 20, 5, 21, 6, 22, 7, 23);
  const auto high = (Vec<uint16_t>)__builtin_shufflevector(bytes, none, 8, 24, 9, 25, 10, 26, 11,
                                                           27, 12, 28, 13, 29, 14, 30, 15, 31);
  const Vec<uint16_t> zero{};
  lanes[0] = (Vec<uint32_t>)__builtin_shufflevector(low, zero, 0, 8, 1, 9, 2, 10, 3, 11);
  lanes[1] = (Vec<uint32_t>)__builtin_shufflevector(low, zero, 4, 12, 5, 13, 6, 14, 7, 15);
  lanes[2] = (Vec<uint32_t>)__builtin_shufflevector(high, zero, 0, 8, 1, 9, 2, 10, 3, 11);
  lanes[3] = (Vec<uint32_t>)__builtin_shufflevector(high, zero, 4, 12, 5, 13, 6, 14, 7, 15);
}

BLOCKGATE_INLINE void widen(const int8_t* p, SignedLanes& lanes) {
  PanelLanes bytes;
  widen(reinterpret_cast<const uint8_t*>(p), bytes);
  for (int v = 0; v < PAIR_VECTORS; ++v) lanes[v] = (Vec<int32_t>)(bytes[v] << 24) >> 24;
}

BLOCKGATE_INLINE void widen_pairs(const int8_t* p, PanelPairs& pairs) {
  const Vec<int8_t> low = load(p), high = load(p + 16);
  // A byte beside itself, shifted down, is the widened byte in either byte order.
  const auto first_half = [](Vec<int8_t> v) {
    return (Vec<int16_t>)__builtin_shufflevector(v, v, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7,
                                                 7) >> 8;
  };
  const auto second_half = [](Vec<int8_t> v) {
    return (Vec<int16_t>)__builtin_shufflevector(v, v, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13,
                                                 14, 14, 15, 15) >> 8;
  };
  pairs[0] = first_half(low);
  pairs[1] = second_half(low);
  pairs[2] = first_half(high);
  pairs[3] = second_half(high);
}

BLOCKGATE_INLINE Vec<int32_t> add_pairs(Vec<int32_t> sum, Vec<int16_t> a, Vec<int16_t> b) {
#if defined(__SSE2__)
  return sum + (Vec<int32_t>)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  // Through unsigned: shifting a negative number left is undefined in too many dialects.
  const auto low = [](Vec<int16_t> v) { return (Vec<int32_t>)((Vec<uint32_t>)v << 16) >> 16; };
  const auto high = [](Vec<int16_t> v) { return (Vec<int32_t>)v >> 16; };
  return sum + low(a) * low(b) + high(a) * high(b);
#endif
}

BLOCKGATE_INLINE Vec<int16_t> multiply_bytes(Vec<uint8_t> a, Vec<int8_t> b) {
  // All machines of this set are little-endian: the first byte of a pair is the low one.
  const auto first = [](Vec<int8_t> v) { return (Vec<int16_t>)((Vec<uint16_t>)v << 8) >> 8; };
  const auto unsigned_a = (Vec<uint16_t>)a;
  return (Vec<int16_t>)(unsigned_a & 0xff) * first(b) +
         (Vec<int16_t>)(unsigned_a >> 8) * ((Vec<int16_t>)b >> 8);
}

template <int BYTES>
BLOCKGATE_INLINE Vec<float> repeat(const void* p) {
  static_assert(BYTES == BLOCKGATE_VECTOR_BYTES);
  return load(static_cast<const float*>(p));
}

template <class T>
BLOCKGATE_INLINE Vec<T> load_first(const T* p, int64_t count) {
  Vec<T> v{};
  for (int j = 0; j < LANES<T>; ++j)
    if (j < count) v[j] = p[j];
  return v;
}

template <class V>
BLOCKGATE_INLINE uint64_t sign_bits(V v) {
  uint64_t bits = 0;
  for (uint64_t j = 0; j < sizeof v / sizeof v[0]; ++j) bits |= uint64_t(v[j] < 0) << j;
  return bits;
}

template <class T>
BLOCKGATE_INLINE void transpose(Vec<T> (&rows)[LANES<T>]) {
  transpose_by_rounds<T>(rows);
}

}  // namespace blockgate::BLOCKGATE_ISA
