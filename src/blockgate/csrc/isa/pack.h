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

// weight (outputs x depth, row-major) -> panels[output / 16][k][output % 16], zero padded.
template <class T>
void transpose_to_panels(const T* weight, int64_t stride, int64_t outputs, int64_t depth,
                         T* panels) {
  constexpr int64_t L = LANES<T>;
  for (int64_t first = 0; first < outputs; first += PANEL, panels += depth * PANEL) {
    const int64_t width = smaller(PANEL, outputs - first);
    const T* rows = weight + first * stride;
    const int64_t whole = width == PANEL ? depth / L * L : 0;
    for (int64_t k = 0; k < whole; k += L)
      for (int64_t o = 0; o < PANEL; o += L)
        transpose_square(rows + o * stride + k, stride, panels + k * PANEL + o, PANEL);
    for (int64_t k = whole; k < depth; ++k)
      for (int64_t o = 0; o < PANEL; ++o)
        panels[k * PANEL + o] = o < width ? rows[o * stride + k] : T(0);
  }
}

// weight (rows x columns, row-major) -> panels[column / 16][row][column % 16], zero padded.
template <class T>
void copy_to_panels(const T* weight, int64_t stride, int64_t rows, int64_t columns, T* panels) {
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
