// Rows of a weight to panels of 16 outputs, and narrow packed weights to what is computed in.
#pragma once

#include "integer_tile.h"

namespace blockgate::BLOCKGATE_ISA {

// One round of interleaving two vectors, low halves then high halves.
template <class T>
BLOCKGATE_INLINE void interleave(Vec<T> a, Vec<T> b, Vec<T>& low, Vec<T>& high) {
  if constexpr (LANES<T> == 2) {
    low = __builtin_shufflevector(a, b, 0, 2);
    high = __builtin_shufflevector(a, b, 1, 3);
  } else if constexpr (LANES<T> == 4) {
    low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  } else if constexpr (LANES<T> == 8) {
    low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  } else {
    low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                   31);
  }
}

// rows[i] becomes column i: log2(LANES) rounds of interleaving row i with row i + LANES / 2.
template <class T>
BLOCKGATE_INLINE void transpose_vectors(Vec<T> (&rows)[LANES<T>]) {
  constexpr int L = LANES<T>;
#pragma GCC unroll 4
  for (int round = 1; round < L; round *= 2) {
    Vec<T> next[L];
#pragma GCC unroll 16
    for (int i = 0; i < L / 2; ++i)
      interleave<T>(rows[i], rows[i + L / 2], next[2 * i], next[2 * i + 1]);
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) rows[i] = next[i];
  }
}

#if BLOCKGATE_VECTOR_BYTES == 32
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
#endif

template <class T>
BLOCKGATE_INLINE void transpose_square(const T* source, int64_t source_stride, T* target,
                                       int64_t target_stride) {
  constexpr int L = LANES<T>;
  Vec<T> rows[L];
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) rows[i] = load(source + i * source_stride);
#if BLOCKGATE_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == sizeof(float)) transpose_eight(rows);
  else transpose_vectors<T>(rows);
#else
  transpose_vectors<T>(rows);
#endif
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

// One panel converted, to be read many times.
inline void expand(const BFloat16* source, int64_t depth, float* target) {
  for (int64_t i = 0; i < depth * PANEL; i += LANES<float>)
    store(target + i, load_weight(source + i));
}

inline void expand(const int8_t* source, int64_t depth, int16_t* target) {
  for (int64_t k = 0; k < depth; k += 2) {
    PanelPairs pairs;
    load_pairs(source + k * PANEL, k + 1 < depth ? PANEL : 0, pairs);
#pragma GCC unroll 4
    for (int v = 0; v < PAIR_VECTORS; ++v)
      store(target + k * PANEL + v * LANES<int16_t>, pairs[v]);
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
