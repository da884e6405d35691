// One block's part of the forward product: tiles of tokens and panels, added to the results.
#pragma once

#include "isa/quads.h"

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
  const float* scale;  // of integer weights, at the first panel
  Results<T> y;        // at the first panel's first output
  int64_t outputs;
  const Entry<T>* entries;  // null: tokens first_token, first_token + 1, ... with gate 1
  int64_t first_token, count;
  const float* step_size = nullptr;  // of inputs in steps, for token 0
  // Of inputs in bytes: what 0 is counted as, for token 0, and the sums of the weights.
  const int32_t* zero = nullptr;
  const int32_t* weight_sums = nullptr;
};

// y = fma(gate, acc, base) for one token; `width` of the panels' outputs exist. Integer sums come
// with a gate in which the size of an input step is a factor, and with the scales of the weights.
template <class T, class Sum = T, int VECTORS>
BLOCKGATE_INLINE void add_gated(T* y, const T* base, const Vec<Sum> (&acc)[VECTORS], T gate,
                                const float* scale) {
  constexpr int L = LANES<T>;
#pragma GCC unroll 16
  for (int j = 0; j < VECTORS; ++j) {
    Vec<T> factor = broadcast(gate);
    if constexpr (std::is_integral_v<Sum>) factor *= load(scale + j * L);
    store(y + j * L,
          multiply_add(factor, __builtin_convertvector(acc[j], Vec<T>), load(base + j * L)));
  }
}

template <class T, class Sum>
__attribute__((noinline)) void add_gated_values(T* y, const T* base, const Sum* values, T gate,
                                                const float* scale, int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    T factor = gate;
    if constexpr (std::is_integral_v<Sum>) factor *= scale[i];
    y[i] = multiply_add(factor, T(values[i]), base[i]);
  }
}

// The same at a ragged edge, on a copy: tiles whose address is taken would live in memory.
template <class T, class Sum = T, int VECTORS>
BLOCKGATE_INLINE void add_gated_edge(T* y, const T* base, const Vec<Sum> (&acc)[VECTORS], T gate,
                                     const float* scale, int64_t width) {
  constexpr int L = LANES<T>;
  Sum values[VECTORS * L];
#pragma GCC unroll 16
  for (int j = 0; j < VECTORS; ++j) store(values + j * L, acc[j]);
  add_gated_values<T, Sum>(y, base, values, gate, scale, width);
}

// GATED: the tokens are those of job.entries, and the sum so far is in y.
template <bool GATED, int ROWS, int PANELS, class T, class W>
BLOCKGATE_INLINE void forward_tile(const BlockJob<T, W>& job, int64_t panel, int64_t first) {
  using Math = Arithmetic<T, W>;
  const Entry<T>* const entries = job.entries + first;
  const auto token_of = [&](int m) __attribute__((always_inline)) {
    return GATED ? int64_t(entries[m].token) : job.first_token + first + m;
  };
  T* const y = job.y.data + panel * PANEL;
  const typename Math::Input* rows[ROWS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) rows[m] = job.x + token_of(m) * job.x_stride;
  // The next tokens are anywhere: no hardware prefetcher finds them.
  if (GATED && first + 2 * ROWS <= job.count) {
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      __builtin_prefetch(job.x + token_of(ROWS + m) * job.x_stride);
      __builtin_prefetch(y + token_of(ROWS + m) * job.y.stride);
    }
  }
  Tile<typename Math::Sum, ROWS, PANELS> tile;
  const W* panels = job.panels + panel * job.panel_stride;
  if constexpr (Math::IN_QUADS) {
    int32_t zero[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) zero[m] = job.zero[token_of(m)];
    tile_multiply_quads(tile, rows, zero, panels, job.panel_stride, job.depth,
                        job.weight_sums + panel * PANEL);
  } else if constexpr (Math::IN_PAIRS) {
    tile_multiply_pairs(tile, rows, panels, job.panel_stride, job.depth);
  } else {
    tile_multiply<1>(tile, rows, panels, job.panel_stride, job.depth);
  }

  constexpr bool INTEGERS = std::is_integral_v<typename Math::Sum>;
  const float* scale = INTEGERS ? job.scale + panel * PANEL : nullptr;
  const int64_t width = job.outputs - panel * PANEL;
  const auto add = [&](const auto& to) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const int64_t token = token_of(m);
      T gate = GATED ? entries[m].gate : T(1);
      if constexpr (INTEGERS) gate *= job.step_size[token];
      T* const target = y + token * job.y.stride;
      to(target, GATED ? target : job.y.base + token * job.y.base_stride + panel * PANEL,
         tile.acc[m], gate);
    }
  };
  if (width >= PANELS * PANEL)
    add([&](T* target, const T* base, const auto& acc, T gate) __attribute__((always_inline)) {
      add_gated<T, typename Math::Sum>(target, base, acc, gate, scale);
    });
  else
    add([&](T* target, const T* base, const auto& acc, T gate) __attribute__((always_inline)) {
      add_gated_edge<T, typename Math::Sum>(target, base, acc, gate, scale, width);
    });
}

// One tile of tokens over all panels in [panel, panel_end), widest tiles first.
template <bool GATED, int ROWS, int PANELS, class T, class W>
BLOCKGATE_INLINE void forward_panels(const BlockJob<T, W>& job, int64_t panel, int64_t panel_end,
                                     int64_t first) {
  for (; panel + PANELS <= panel_end; panel += PANELS)
    forward_tile<GATED, ROWS, PANELS>(job, panel, first);
  if constexpr (PANELS > 1) forward_panels<GATED, ROWS, PANELS / 2>(job, panel, panel_end, first);
}

// `tiles` tiles of as many rows, from token `first` on: one call for all of them, since a call costs
// as much as a small tile.
template <bool GATED, int ROWS, class T, class W>
__attribute__((noinline)) void forward_tiles(const BlockJob<T, W>& job, int64_t panel,
                                             int64_t panel_end, int64_t first, int64_t tiles) {
  using Math = Arithmetic<T, W>;
  constexpr int PANELS = tile_panels<std::conditional_t<Math::IN_QUADS, T, typename Math::Sum>>(ROWS);
  for (; tiles > 0; --tiles, first += ROWS)
    forward_panels<GATED, ROWS, PANELS>(job, panel, panel_end, first);
}

template <class T, class W>
void forward_block(const BlockJob<T, W>& job, int64_t panels) {
  // Panels that stay in the first-level cache while all tiles of tokens pass over them.
  const int64_t resident = larger(1, 16384 / (panel_elements<W>(job.depth) * int64_t(sizeof(W))));
  const int64_t group = job.count <= MAX_ROWS<T> ? panels : resident;
  for (int64_t panel = 0; panel < panels; panel += group) {
    const int64_t panel_end = smaller(panel + group, panels);
    with_even_tiles<T>(job.count, [&](auto n, int64_t first, int64_t tiles) {
      constexpr int ROWS = decltype(n)::value;
      if (job.entries) forward_tiles<true, ROWS>(job, panel, panel_end, first, tiles);
      else forward_tiles<false, ROWS>(job, panel, panel_end, first, tiles);
    });
  }
}

// A block whose weights W came from a storage type with scales for groups of inputs: the groups one
// after the other, each as a small block, `scale_stride` apart in the scales.
template <class Storage, class T, class W>
void forward_groups(const BlockJob<T, W>& whole, int64_t panels, int64_t scale_stride) {
  if constexpr (GROUP<Storage> == WHOLE_BLOCK) return forward_block<T, W>(whole, panels);
  // Copied only here: a job is read sooner after it was written than a copy could be.
  BlockJob<T, W> job = whole;
  for (int64_t k = 0; k < whole.depth; k += GROUP<Storage>) {
    job.depth = smaller(GROUP<Storage>, whole.depth - k);
    forward_block<T, W>(job, panels);
    job.x += GROUP<Storage>;
    job.panels += elements_to<W>(GROUP<Storage>);
    job.scale += scale_stride;
    // The first group was added to the base, all others to the sum so far.
    job.y.base = job.y.data;
    job.y.base_stride = job.y.stride;
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
