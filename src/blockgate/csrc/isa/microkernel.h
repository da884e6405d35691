// The register tile: ROWS rows of one operand times PANELS panels of 16 of the other.
//
// Every accumulator is one chain over k ascending, acc = fma(a[k], w[k], acc) from 0. Tiles only
// differ in how many chains run side by side, so a tile's shape never changes a result.
#pragma once

#include "isa/formats.h"

namespace blockgate::BLOCKGATE_ISA {

template <class T, int ROWS, int PANELS>
struct Tile {
  static constexpr int WIDTH = PANELS * PANEL_VECTORS<T>;
  Vec<T> acc[ROWS][WIDTH];
};

// Most rows in a tile of one panel, and most panels (a power of two) beside ROWS rows.
template <class T>
inline constexpr int MAX_ROWS =
    BLOCKGATE_ACCUMULATORS / PANEL_VECTORS<T> < 6 ? BLOCKGATE_ACCUMULATORS / PANEL_VECTORS<T> : 6;

template <class T>
constexpr int tile_panels(int rows) {
  int panels = 1;
  while (panels < 8 && 2 * panels * rows * PANEL_VECTORS<T> <= BLOCKGATE_ACCUMULATORS) panels *= 2;
  return panels;
}

// K_STRIDE: distance of consecutive k in a row of the left operand.
template <int K_STRIDE, class T, class W, int ROWS, int PANELS>
BLOCKGATE_INLINE void tile_step(Tile<T, ROWS, PANELS>& tile, const T* const (&rows)[ROWS],
                                const W* panels, int64_t panel_stride, int64_t k) {
  constexpr int VECTORS = PANEL_VECTORS<T>;
  if constexpr (ROWS == 1) {
    // Each weight is used once: loading all of them first would crowd out the accumulators.
    const Vec<T> a = broadcast(rows[0][k * K_STRIDE]);
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) {
        Vec<T>& acc = tile.acc[0][p * VECTORS + v];
        acc = multiply_add(
            a, load_weight(panels + p * panel_stride + k * PANEL + v * LANES<T>), acc);
      }
    return;
  }
  Vec<T> w[PANELS * VECTORS];
#pragma GCC unroll 8
  for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v)
      w[p * VECTORS + v] = load_weight(panels + p * panel_stride + k * PANEL + v * LANES<T>);
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) {
    const Vec<T> a = broadcast(rows[m][k * K_STRIDE]);
#pragma GCC unroll 16
    for (int j = 0; j < PANELS * VECTORS; ++j)
      tile.acc[m][j] = multiply_add(a, w[j], tile.acc[m][j]);
  }
}

template <class T, int ROWS, int PANELS>
BLOCKGATE_INLINE void tile_clear(Tile<T, ROWS, PANELS>& tile) {
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 16
    for (int j = 0; j < Tile<T, ROWS, PANELS>::WIDTH; ++j) tile.acc[m][j] = Vec<T>{};
}

template <int K_STRIDE, class T, class W, int ROWS, int PANELS>
BLOCKGATE_INLINE void tile_multiply(Tile<T, ROWS, PANELS>& tile, const T* const (&rows)[ROWS],
                                    const W* panels, int64_t panel_stride, int64_t depth) {
  tile_clear(tile);
  for (int64_t k = 0; k < depth; ++k)
    tile_step<K_STRIDE>(tile, rows, panels, panel_stride, k);
}

// Calls visit(integral constant) for the tile of `rows` rows, 1 .. MAX_ROWS<T>.
template <int ROWS>
struct RowCount {
  static constexpr int value = ROWS;
};

template <class T, class Visit>
BLOCKGATE_INLINE void with_row_count(int64_t rows, const Visit& visit) {
  switch (rows) {
    case 1: visit(RowCount<1>{}); break;
    case 2: if constexpr (MAX_ROWS<T> >= 2) visit(RowCount<2>{}); break;
    case 3: if constexpr (MAX_ROWS<T> >= 3) visit(RowCount<3>{}); break;
    case 4: if constexpr (MAX_ROWS<T> >= 4) visit(RowCount<4>{}); break;
    case 5: if constexpr (MAX_ROWS<T> >= 5) visit(RowCount<5>{}); break;
    case 6: if constexpr (MAX_ROWS<T> >= 6) visit(RowCount<6>{}); break;
  }
}

// Cuts `count` rows into the fewest tiles, as equal as possible: 7 are 4 + 3, not 6 + 1. Calls
// visit(integral constant, first, tiles) for each run of tiles with that many rows.
template <class T, class Visit>
BLOCKGATE_INLINE void with_even_tiles(int64_t count, const Visit& visit) {
  const int64_t tiles = ceil_div(count, MAX_ROWS<T>);
  const int64_t rows = count / tiles, larger_tiles = count % tiles;
  if (larger_tiles)
    with_row_count<T>(rows + 1, [&](auto n) { visit(n, int64_t(0), larger_tiles); });
  with_row_count<T>(
      rows, [&](auto n) { visit(n, larger_tiles * (rows + 1), tiles - larger_tiles); });
}

}  // namespace blockgate::BLOCKGATE_ISA
