// Rows of a weight to panels of 16 outputs.
#pragma once

#include "isa/vec.h"

namespace blockgate::BLOCKGATE_ISA {

template <class T>
BLOCKGATE_INLINE void transpose_square(const T* source, int64_t source_stride, T* target,
                                       int64_t target_stride) {
  constexpr int L = LANES<T>;
  Vec<T> rows[L];
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) rows[i] = load(source + i * source_stride);
  transpose<T>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) store(target + i * target_stride, rows[i]);
}

// Four rows of four values, for blocks that are too narrow for a square of vectors.
template <class T>
BLOCKGATE_INLINE void transpose_quad(const T* source, int64_t source_stride, T* target,
                                     int64_t target_stride) {
  using Quad = Part<T, 4>;
  Quad rows[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) __builtin_memcpy(&rows[i], source + i * source_stride, sizeof(Quad));
  const Quad a = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5);
  const Quad b = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
  const Quad c = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
  const Quad d = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
  const Quad columns[4] = {
      __builtin_shufflevector(a, c, 0, 1, 4, 5), __builtin_shufflevector(a, c, 2, 3, 6, 7),
      __builtin_shufflevector(b, d, 0, 1, 4, 5), __builtin_shufflevector(b, d, 2, 3, 6, 7)};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    __builtin_memcpy(target + i * target_stride, &columns[i], sizeof(Quad));
}

// Four rows of two values.
template <class T>
BLOCKGATE_INLINE void transpose_pairs(const T* source, int64_t source_stride, T* target,
                                      int64_t target_stride) {
  using Quad = Part<T, 4>;
  Part<T, 2> rows[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    __builtin_memcpy(&rows[i], source + i * source_stride, sizeof rows[i]);
  const Quad a = __builtin_shufflevector(rows[0], rows[1], 0, 1, 2, 3);
  const Quad b = __builtin_shufflevector(rows[2], rows[3], 0, 1, 2, 3);
  const Quad first = __builtin_shufflevector(a, b, 0, 2, 4, 6);
  const Quad second = __builtin_shufflevector(a, b, 1, 3, 5, 7);
  __builtin_memcpy(target, &first, sizeof first);
  __builtin_memcpy(target + target_stride, &second, sizeof second);
}

// (rows x columns) -> (columns x rows), both row-major.
template <class T>
void transpose_matrix(const T* source, int64_t source_stride, int64_t rows, int64_t columns,
                      T* target, int64_t target_stride) {
  constexpr int64_t L = LANES<T>;
  for (int64_t r = 0; r < rows; r += L)
    for (int64_t c = 0; c < columns; c += L) {
      const T* from = source + r * source_stride + c;
      T* to = target + c * target_stride + r;
      if (r + L <= rows && c + L <= columns) {
        transpose_square(from, source_stride, to, target_stride);
        continue;
      }
      for (int64_t j = 0; j < smaller(L, columns - c); ++j)
        for (int64_t i = 0; i < smaller(L, rows - r); ++i)
          to[j * target_stride + i] = from[i * source_stride + j];
    }
}

// weight (outputs x depth, row-major) -> panels[output / 16][k][output % 16], zero padded.
template <class T>
void transpose_to_panels(const T* weight, int64_t stride, int64_t outputs, int64_t depth,
                         T* panels) {
  constexpr int64_t L = LANES<T>;
  for (int64_t first = 0; first < outputs; first += PANEL, panels += depth * PANEL) {
    const int64_t width = smaller(PANEL, outputs - first);
    const T* rows = weight + first * stride;
    int64_t k = 0;
    if (width == PANEL) {
      for (; k + L <= depth; k += L)
        for (int64_t o = 0; o < PANEL; o += L)
          transpose_square(rows + o * stride + k, stride, panels + k * PANEL + o, PANEL);
      for (; k + 4 <= depth; k += 4)
        for (int64_t o = 0; o < PANEL; o += 4)
          transpose_quad(rows + o * stride + k, stride, panels + k * PANEL + o, PANEL);
      for (; k + 2 <= depth; k += 2)
        for (int64_t o = 0; o < PANEL; o += 4)
          transpose_pairs(rows + o * stride + k, stride, panels + k * PANEL + o, PANEL);
    }
    for (; k < depth; ++k)
      for (int64_t o = 0; o < PANEL; ++o)
        panels[k * PANEL + o] = o < width ? rows[o * stride + k] : T(0);
  }
}

// weight (rows x columns, row-major) -> panels[row / GROUP][column][row % GROUP], zero padded; the
// columns are at most WIDTH.
template <int WIDTH, class T>
void copy_to_thin_panel(const T* weight, int64_t stride, int64_t rows, int64_t columns, T* panel) {
  constexpr int GROUP = PANEL / WIDTH;
  for (int64_t first = 0; first < rows; first += GROUP, weight += GROUP * stride, panel += PANEL) {
    if (columns < WIDTH || first + GROUP > rows) {
      for (int64_t i = 0; i < WIDTH; ++i)
        for (int64_t r = 0; r < GROUP; ++r)
          panel[i * GROUP + r] = i < columns && first + r < rows ? weight[r * stride + i] : T(0);
    } else if constexpr (WIDTH == 4) {
      transpose_quad(weight, stride, panel, GROUP);
    } else if constexpr (WIDTH == 2) {
      transpose_pairs(weight, stride, panel, GROUP);
      transpose_pairs(weight + 4 * stride, stride, panel + 4, GROUP);
    } else {
#pragma GCC unroll 16
      for (int64_t r = 0; r < GROUP; ++r)
#pragma GCC unroll 16
        for (int64_t i = 0; i < WIDTH; ++i) panel[i * GROUP + r] = weight[r * stride + i];
    }
  }
}

// weight (rows x columns, row-major) -> panels[column / 16][row][column % 16], zero padded; fewer
// columns than a panel has as above.
template <class T>
void copy_to_panels(const T* weight, int64_t stride, int64_t rows, int64_t columns, T* panels) {
  switch (input_panel(columns)) {
    case 1: return copy_to_thin_panel<1>(weight, stride, rows, columns, panels);
    case 2: return copy_to_thin_panel<2>(weight, stride, rows, columns, panels);
    case 4: return copy_to_thin_panel<4>(weight, stride, rows, columns, panels);
    case 8: return copy_to_thin_panel<8>(weight, stride, rows, columns, panels);
  }
  for (int64_t first = 0; first < columns; first += PANEL, panels += rows * PANEL) {
    const int64_t width = smaller(PANEL, columns - first);
    if (width == PANEL) {
      for (int64_t r = 0; r < rows; ++r)
        __builtin_memcpy(panels + r * PANEL, weight + r * stride + first, PANEL * sizeof(T));
    } else {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < PANEL; ++i)
          panels[r * PANEL + i] = i < width ? weight[r * stride + first + i] : T(0);
    }
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
