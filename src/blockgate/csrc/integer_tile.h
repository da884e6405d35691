// The register tile in integers: int8 weights times int16 inputs, exact sums in int32.
//
// Inputs are bounded so that no sum over a block can overflow (see quantise.h). Exact sums have no
// order, so tiles, threads and instruction sets agree on every bit. Two k are multiplied and added
// at once, so weights come in pairs of k: stored ones are interleaved on load, expanded ones lie
// as [k / 2][16 outputs][2], outputs in the order of load_pairs. A lone last k is paired with an
// input of 0.
#pragma once

#include "microkernel.h"

namespace blockgate::BLOCKGATE_ISA {

// What a product of T inputs with weights W is computed in. int16_t: expanded int8_t.
template <class T, class W>
struct Arithmetic {
  using Input = T;
  using Sum = T;
  using Expanded = T;
  static constexpr bool IN_PAIRS = false;
};
template <>
struct Arithmetic<float, int16_t> {
  using Input = int16_t;
  using Sum = int32_t;
  using Expanded = int16_t;
  static constexpr bool IN_PAIRS = true;
};
template <>
struct Arithmetic<float, int8_t> : Arithmetic<float, int16_t> {};

// Vectors of pairs that hold one panel.
inline constexpr int PAIR_VECTORS = PANEL_VECTORS<int32_t>;
using PanelPairs = Vec<int16_t>[PAIR_VECTORS];

// Per 32-bit lane: a[0] * b[0] + a[1] * b[1].
BLOCKGATE_INLINE Vec<int32_t> multiply_pairs(Vec<int16_t> a, Vec<int16_t> b) {
#if BLOCKGATE_X86 && BLOCKGATE_VECTOR_BYTES == 64
  return (Vec<int32_t>)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif BLOCKGATE_X86 && BLOCKGATE_VECTOR_BYTES == 32
  return (Vec<int32_t>)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif BLOCKGATE_X86 && BLOCKGATE_VECTOR_BYTES == 16
  return (Vec<int32_t>)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  // Through unsigned: shifting a negative number left is undefined in too many dialects.
  const auto low = [](Vec<int16_t> v) { return (Vec<int32_t>)((Vec<uint32_t>)v << 16) >> 16; };
  const auto high = [](Vec<int16_t> v) { return (Vec<int32_t>)v >> 16; };
  return low(a) * low(b) + high(a) * high(b);
#endif
}

// The 16 weights at k and those `partner` further on, interleaved and widened.
BLOCKGATE_INLINE void load_pairs(const int8_t* p, int64_t partner, PanelPairs& pairs) {
#if BLOCKGATE_X86 && BLOCKGATE_VECTOR_BYTES == 32
  // Widening comes first, since it is cheapest while loading; interleaving then works within halves
  // of a vector, and in_order puts the sums right.
  const __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i second = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + partner)));
  pairs[0] = (Vec<int16_t>)_mm256_unpacklo_epi16(first, second);
  pairs[1] = (Vec<int16_t>)_mm256_unpackhi_epi16(first, second);
#else
  typedef int8_t Bytes __attribute__((vector_size(16)));
  Bytes a, b;
  __builtin_memcpy(&a, p, sizeof a);
  __builtin_memcpy(&b, p + partner, sizeof b);
  const Bytes low =
      __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const Bytes high =
      __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#if BLOCKGATE_X86 && BLOCKGATE_VECTOR_BYTES == 64
  pairs[0] = (Vec<int16_t>)_mm512_cvtepi8_epi16(_mm256_set_m128i((__m128i)high, (__m128i)low));
#else
  // A byte beside itself, shifted down, is the widened byte in either byte order.
  const auto first_half = [](Bytes v) {
    return (Vec<int16_t>)__builtin_shufflevector(v, v, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7,
                                                 7) >> 8;
  };
  const auto second_half = [](Bytes v) {
    return (Vec<int16_t>)__builtin_shufflevector(v, v, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13,
                                                 14, 14, 15, 15) >> 8;
  };
  pairs[0] = first_half(low);
  pairs[1] = second_half(low);
  pairs[2] = first_half(high);
  pairs[3] = second_half(high);
#endif
#endif
}

BLOCKGATE_INLINE void load_pairs(const int16_t* p, int64_t, PanelPairs& pairs) {
#pragma GCC unroll 4
  for (int v = 0; v < PAIR_VECTORS; ++v) pairs[v] = load(p + v * LANES<int16_t>);
}

// Fewer panels at once than in float: a product needs a register beside its sum, sums that are
// ready after one cycle need no company to fill the pipeline, and few panels are few streams.
template <>
constexpr int tile_panels<int32_t>(int rows) {
  int panels = 1;
  while (panels < 8 && 4 * panels * rows * PAIR_VECTORS <= BLOCKGATE_ACCUMULATORS) panels *= 2;
  return panels;
}

// k and k + 1, k even; `partner` is the distance of their weights, 0 for a lone last k.
template <class W, int ROWS, int PANELS>
BLOCKGATE_INLINE void pair_step(Tile<int32_t, ROWS, PANELS>& tile,
                                const int16_t* const (&rows)[ROWS], const W* panels,
                                int64_t panel_stride, int64_t k, int64_t partner) {
#pragma GCC unroll 8
  for (int p = 0; p < PANELS; ++p) {
    PanelPairs weights;
    load_pairs(panels + p * panel_stride + k * PANEL, partner, weights);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      int32_t pair;
      __builtin_memcpy(&pair, rows[m] + k, sizeof pair);
      const auto inputs = (Vec<int16_t>)broadcast_key(pair);
#pragma GCC unroll 4
      for (int v = 0; v < PAIR_VECTORS; ++v)
        tile.acc[m][p * PAIR_VECTORS + v] += multiply_pairs(inputs, weights[v]);
    }
  }
}

// Puts sums in the order of the outputs, after the last step: load_pairs may have changed it.
template <int ROWS, int PANELS>
BLOCKGATE_INLINE void in_order([[maybe_unused]] Tile<int32_t, ROWS, PANELS>& tile) {
#if BLOCKGATE_X86 && BLOCKGATE_VECTOR_BYTES == 32
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; ++p) {
      const auto low = (__m256i)tile.acc[m][2 * p], high = (__m256i)tile.acc[m][2 * p + 1];
      tile.acc[m][2 * p] = (Vec<int32_t>)_mm256_permute2x128_si256(low, high, 0x20);
      tile.acc[m][2 * p + 1] = (Vec<int32_t>)_mm256_permute2x128_si256(low, high, 0x31);
    }
#endif
}

template <class W, int ROWS, int PANELS>
BLOCKGATE_INLINE void tile_multiply_pairs(Tile<int32_t, ROWS, PANELS>& tile,
                                          const int16_t* const (&rows)[ROWS], const W* panels,
                                          int64_t panel_stride, int64_t depth) {
  tile_clear(tile);
  int64_t k = 0;
#pragma GCC unroll 4
  for (; k + 1 < depth; k += 2) pair_step(tile, rows, panels, panel_stride, k, PANEL);
  if (k < depth) pair_step(tile, rows, panels, panel_stride, k, 0);
  in_order(tile);
}

}  // namespace blockgate::BLOCKGATE_ISA
