// One block's part of the forward product: tiles of tokens and panels, added to the results.
#pragma once

#include "microkernel.h"

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
  const T* x;  // at the block's first column
  int64_t x_stride;
  const W* panels;
  int64_t panel_stride, depth;
  const float* scale;  // at the first panel, or null
  Results<T> y;        // at the first panel's first output
  int64_t outputs;
  const Entry<T>* entries;  // null: tokens first_token, first_token + 1, ... with gate 1
  int64_t first_token, count;
};

// y = fma(gate, acc, base) for one token; `width` of the panels' outputs exist.
template <class T, int VECTORS>
BLOCKGATE_INLINE void add_gated(T* y, const T* base, const Vec<T> (&acc)[VECTORS], T gate,
                                const float* scale, int64_t width) {
  constexpr int L = LANES<T>;
  if (width >= VECTORS * L) {
#pragma GCC unroll 16
    for (int j = 0; j < VECTORS; ++j) {
      Vec<T> factor = broadcast(gate);
      if constexpr (sizeof(T) == sizeof(float))
        if (scale) factor *= load(scale + j * L);
      store(y + j * L, multiply_add(factor, acc[j], load(base + j * L)));
    }
    return;
  }
  T values[VECTORS * L];
#pragma GCC unroll 16
  for (int j = 0; j < VECTORS; ++j) store(values + j * L, acc[j]);
  for (int64_t i = 0; i < width; ++i) {
    const T factor = scale ? gate * T(scale[i]) : gate;
    y[i] = multiply_add(factor, values[i], base[i]);
  }
}

template <int ROWS, int PANELS, class T, class W>
BLOCKGATE_INLINE void forward_tile(const BlockJob<T, W>& job, int64_t panel, int64_t first) {
  const T* rows[ROWS];
  T* y[ROWS];
  const T* base[ROWS];
  T gates[ROWS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) {
    const int64_t token = job.entries ? job.entries[first + m].token : job.first_token + first + m;
    gates[m] = job.entries ? job.entries[first + m].gate : T(1);
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
  Tile<T, ROWS, PANELS> tile;
  tile_multiply<1>(tile, rows, job.panels + panel * job.panel_stride, job.panel_stride, job.depth);
  const float* scale = job.scale ? job.scale + panel * PANEL : nullptr;
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
    add_gated<T>(y[m], base[m], tile.acc[m], gates[m], scale, job.outputs - panel * PANEL);
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
  const int64_t resident = larger(1, 4096 / (job.depth * PANEL));
  const EvenSplit split = even_split(job.count, MAX_ROWS<T>);
  const int64_t group = split.parts == 1 ? panels : resident;
  for (int64_t panel = 0; panel < panels; panel += group) {
    const int64_t panel_end = smaller(panel + group, panels);
    int64_t first = 0;
    for (int64_t part = 0; part < split.parts; ++part) {
      const int64_t rows = split.size + (part < split.larger_parts);
      with_row_count<T>(rows, [&](auto n) {
        constexpr int ROWS = decltype(n)::value;
        forward_panels<ROWS, tile_panels<T>(ROWS)>(job, panel, panel_end, first);
      });
      first += rows;
    }
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
