// The register tile in integers: narrow weights times int16 inputs, exact sums in int32.
//
// Inputs are bounded so that no sum can overflow (see largest_steps). Exact sums have no
// order, so tiles, threads and instruction sets agree on every bit. Two k are multiplied and added
// at once, so weights come in pairs of k, [k / 2][16 outputs][2], as they are stored and when they
// are expanded to int16. A lone last k is paired with an input of 0.
#pragma once

#include "isa/microkernel.h"

namespace blockgate::BLOCKGATE_ISA {

// Fewer panels at once than in float: a product needs a register beside its sum, sums that are
// ready after one cycle need no company to fill the pipeline, and few panels are few streams.
template <>
constexpr int tile_panels<int32_t>(int rows) {
  int panels = 1;
  while (panels < 8 && 4 * panels * rows * PAIR_VECTORS <= BLOCKGATE_ACCUMULATORS) panels *= 2;
  return panels;
}

// k and k + 1, k even.
template <class W, int ROWS, int PANELS>
BLOCKGATE_INLINE void pair_step(Tile<int32_t, ROWS, PANELS>& tile,
                                const int16_t* const (&rows)[ROWS], const W* panels,
                                int64_t panel_stride, int64_t k) {
#pragma GCC unroll 8
  for (int p = 0; p < PANELS; ++p) {
    PanelPairs weights;
    load_pairs(panels + p * panel_stride + elements_to<W>(k), weights);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      int32_t pair;
      __builtin_memcpy(&pair, rows[m] + k, sizeof pair);
      const auto inputs = (Vec<int16_t>)broadcast_key(pair);
#pragma GCC unroll 4
      for (int v = 0; v < PAIR_VECTORS; ++v)
        {
        Vec<int32_t>& sum = tile.acc[m][p * PAIR_VECTORS + v];
        sum = add_pairs(sum, inputs, weights[v]);
      }
    }
  }
}

// One panel converted, to be read many times.
template <class W>
inline void expand(const W* source, int64_t depth, int16_t* target) {
  for (int64_t k = 0; k < depth; k += 2) {
    PanelPairs pairs;
    load_pairs(source + elements_to<W>(k), pairs);
#pragma GCC unroll 4
    for (int v = 0; v < PAIR_VECTORS; ++v)
      store(target + k * PANEL + v * LANES<int16_t>, pairs[v]);
  }
}

template <class W, int ROWS, int PANELS>
BLOCKGATE_INLINE void tile_multiply_pairs(Tile<int32_t, ROWS, PANELS>& tile,
                                          const int16_t* const (&rows)[ROWS], const W* panels,
                                          int64_t panel_stride, int64_t depth) {
  tile_clear(tile);
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; k += 2) pair_step(tile, rows, panels, panel_stride, k);
}

}  // namespace blockgate::BLOCKGATE_ISA
