// One block's part of the forward product: tiles of tokens and panels, added to the results.
#pragma once

#include "integer_tile.h"

#include <type_traits>

namespace blockgate::BLOCKGATE_ISA {

// Where results are summed, and what each block's part is added to: the sum so far, or the bias.
// Both point to the place of token 0.
template <class T>
struct Results {
  T* data;
  int64_t stride;
  const T* base;
  int64_t base_stride;
};

// Some panels of one block and the tokens that use them.
template <class T, class W>
struct BlockJob {
  const typename Arithmetic<T, W>::Input* x;  // at the block's first column
  int64_t x_stride;
  const W* panels;
  int64_t panel_stride, depth;
  const float* scale;  // of int8 weights, at the first panel
  Results<T> y;        // at the first panel's first output
  int64_t outputs;
  const Entry<T>* entries;  // null: tokens first_token, first_token + 1, ... with gate 1
  int64_t first_token, count;
  const float* step_size = nullptr;  // of int16 inputs, for token 0
};

// y = fma(gate, acc, base) for one token; `width` of the panels' outputs exist. Integer sums come
// with a gate in which the size of an input step is a factor, and with the scales of the weights.
template <class T, class Sum = T, int VECTORS>
BLOCKGATE_INLINE void add_gated(T* y, const T* base, const Vec<Sum> (&acc)[VECTORS], T gate,
                                const float* scale, int64_t width) {
  constexpr int L = LANES<T>;
  constexpr bool SCALED = std::is_integral_v<Sum>;
  if (width >= VECTORS * L) {
#pragma GCC unroll 16
    for (int j = 0; j < VECTORS; ++j) {
      Vec<T> factor = broadcast(gate);
      if constexpr (SCALED) factor *= load(scale + j * L);
      store(y + j * L, multiply_add(factor, __builtin_convertvector(acc[j], Vec<T>),
                                    load(base + j * L)));
    }
    return;
  }
  Sum values[VECTORS * L];
#pragma GCC unroll 16
  for (int j = 0; j < VECTORS; ++j) store(values + j * L, acc[j]);
  for (int64_t i = 0; i < width; ++i) {
    T factor = gate;
    if constexpr (SCALED) factor *= scale[i];
    y[i] = multiply_add(factor, T(values[i]), base[i]);
  }
}

template <int ROWS, int PANELS, class T, class W>
BLOCKGATE_INLINE void forward_tile(const BlockJob<T, W>& job, int64_t panel, int64_t first) {
  using Math = Arithmetic<T, W>;
  const typename Math::Input* rows[ROWS];
  T* y[ROWS];
  const T* base[ROWS];
  T gates[ROWS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) {
    const int64_t token = job.entries ? job.entries[first + m].token : job.first_token + first + m;
    gates[m] = job.entries ? job.entries[first + m].gate : T(1);
    if constexpr (Math::IN_PAIRS) gates[m] *= job.step_size[token];
    rows[m] = job.x + token * job.x_stride;
    y[m] = job.y.data + token * job.y.stride + panel * PANEL;
    base[m] = job.y.base + token * job.y.base_stride + panel * PANEL;
  }
  // The next tokens are anywhere: no hardware prefetcher finds them.
  if (job.entries && first + 2 * ROWS <= job.count) {
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const int64_t token = job.entries[first + ROWS + m].token;
      __builtin_prefetch(job.x + token * job.x_stride);
      __builtin_prefetch(job.y.data + token * job.y.stride + panel * PANEL);
    }
  }
  Tile<typename Math::Sum, ROWS, PANELS> tile;
  const W* panels = job.panels + panel * job.panel_stride;
  if constexpr (Math::IN_PAIRS)
    tile_multiply_pairs(tile, rows, panels, job.panel_stride, job.depth);
  else
    tile_multiply<1>(tile, rows, panels, job.panel_stride, job.depth);
  const float* scale = Math::IN_PAIRS ? job.scale + panel * PANEL : nullptr;
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
    add_gated<T, typename Math::Sum>(y[m], base[m], tile.acc[m], gates[m], scale,
                                     job.outputs - panel * PANEL);
}

// One tile of tokens over all panels in [panel, panel_end), widest tiles first.
template <int ROWS, int PANELS, class T, class W>
BLOCKGATE_INLINE void forward_panels(const BlockJob<T, W>& job, int64_t panel, int64_t panel_end,
                                     int64_t first) {
  for (; panel + PANELS <= panel_end; panel += PANELS)
    forward_tile<ROWS, PANELS>(job, panel, first);
  if constexpr (PANELS > 1) forward_panels<ROWS, PANELS / 2>(job, panel, panel_end, first);
}

template <class T, class W>
void forward_block(const BlockJob<T, W>& job, int64_t panels) {
  // Panels that stay in the first-level cache while all tiles of tokens pass over them.
  const int64_t resident = larger(1, 16384 / (job.depth * PANEL * int64_t(sizeof(W))));
  const EvenSplit split = even_split(job.count, MAX_ROWS<T>);
  const int64_t group = split.parts == 1 ? panels : resident;
  for (int64_t panel = 0; panel < panels; panel += group) {
    const int64_t panel_end = smaller(panel + group, panels);
    int64_t first = 0;
    for (int64_t part = 0; part < split.parts; ++part) {
      const int64_t rows = split.size + (part < split.larger_parts);
      with_row_count<T>(rows, [&](auto n) {
        constexpr int ROWS = decltype(n)::value;
        constexpr int PANELS = tile_panels<typename Arithmetic<T, W>::Sum>(ROWS);
        forward_panels<ROWS, PANELS>(job, panel, panel_end, first);
      });
      first += rows;
    }
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
