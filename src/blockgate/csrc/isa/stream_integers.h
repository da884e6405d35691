// One token and integer weights: the panels of an open block are read as one run of memory.
//
// Sums are exact, so nothing but the speed depends on how they are cut. Reading is all the work, and
// prefetchers of the machine start anew at every block: so the software runs ahead through the very
// list of open blocks, over their ends, and into the row of blocks that is read next.
#pragma once

#include "isa/forward.h"

namespace blockgate::BLOCKGATE_ISA {

inline constexpr int64_t LINE_BYTES = 64;
// Into the second-level cache, which has room for many reads on their way: blocks of 16 KB in any order
// come at 34 GB/s so, of 39 in one run, and at 18 by fetching into the first level, however far ahead.
inline constexpr int64_t LINES_AHEAD = 256;
// Sums of one panel side by side where one instruction multiplies and adds: it takes some cycles.
inline constexpr int PAIR_CHAINS = BLOCKGATE_PAIR_CHAINS;

// Fetches what the reader will read, a line for each line that it reads.
class FetchAhead {
 public:
  // Runs of `size` bytes, at `first` + column * `block`, and one more at `then` (or null). `begun`:
  // the first of them was such a `then` before.
  FetchAhead(const std::byte* first, int64_t block, int64_t size, const OpenBlock* open,
             int64_t count, const void* then, bool begun)
      : first_(first), at_(first), block_(block), size_(size), open_(open), last_(open + count),
        then_(static_cast<const std::byte*>(then)) {
    turn();
    int64_t lines = LINES_AHEAD;
    if (begun) {
      const int64_t done = smaller(lines, ceil_div(end_ - at_, LINE_BYTES));
      lines -= done;
      at_ += done * LINE_BYTES;
      if (at_ >= end_) turn();
    }
    for (; lines > 0; --lines) line();
  }

  BLOCKGATE_INLINE void line() {
    __builtin_prefetch(at_, 0, 2);
    at_ += LINE_BYTES;
    if (at_ >= end_) turn();
  }

  // As many calls of line().
  template <int LINES>
  BLOCKGATE_INLINE void lines() {
    if (end_ - at_ > LINES * LINE_BYTES) {
#pragma GCC unroll 16
      for (int i = 0; i < LINES; ++i) __builtin_prefetch(at_ + i * LINE_BYTES, 0, 2);
      at_ += LINES * LINE_BYTES;
    } else {
      for (int i = 0; i < LINES; ++i) line();
    }
  }

 private:
  void turn() {
    // With nothing left, the same line again and again: it is there already.
    int64_t size = LINE_BYTES;
    if (open_ != last_) {
      at_ = first_ + open_++->col * block_;
      size = size_;
    } else if (then_) {
      at_ = then_;
      then_ = nullptr;
      size = size_;
    } else {
      at_ -= LINE_BYTES;
    }
    end_ = at_ + size;
  }

  const std::byte *first_, *at_, *end_ = nullptr;
  int64_t block_, size_;
  const OpenBlock *open_, *last_;
  const std::byte* then_;
};

// Sums of one panel over the steps x of `depth` inputs, an even number of them or one 0 more.
template <class W>
BLOCKGATE_INLINE void sum_panel(const int16_t* x, const W* weights, int64_t depth,
                                FetchAhead& ahead, Vec<int32_t> (&sum)[PAIR_VECTORS]) {
  constexpr int PAIRS = 4, LINES = PAIRS * PANEL * int(sizeof(W)) / LINE_BYTES;
  static_assert(LINES > 0 && PAIRS % PAIR_CHAINS == 0);
  Vec<int32_t> chains[PAIR_CHAINS][PAIR_VECTORS] = {};
  const auto step = [&](int64_t k, int chain) __attribute__((always_inline)) {
    PanelPairs pairs;
    load_pairs(weights + elements_to<W>(k), pairs);
    int32_t pair;
    __builtin_memcpy(&pair, x + k, sizeof pair);
    const auto inputs = (Vec<int16_t>)broadcast_key(pair);
#pragma GCC unroll 4
    for (int v = 0; v < PAIR_VECTORS; ++v)
      chains[chain][v] = add_pairs(chains[chain][v], inputs, pairs[v]);
  };
  int64_t k = 0;
  for (; k + 2 * PAIRS <= depth; k += 2 * PAIRS) {
#pragma GCC unroll 4
    for (int i = 0; i < LINES; ++i) ahead.line();
#pragma GCC unroll 4
    for (int i = 0; i < PAIRS; ++i) step(k + 2 * i, i % PAIR_CHAINS);
  }
  for (; k < depth; k += 2) step(k, 0);
#pragma GCC unroll 4
  for (int v = 0; v < PAIR_VECTORS; ++v) {
    sum[v] = chains[0][v];
#pragma GCC unroll 4
    for (int c = 1; c < PAIR_CHAINS; ++c) sum[v] += chains[c][v];
  }
}

// Blocks of few inputs: panels side by side share what they read of x, and no chain is long.
inline constexpr int64_t SHALLOW = 64;
inline constexpr int SHALLOW_PANELS = 4;

// Sums of SHALLOW_PANELS panels, each `stride` after the last.
template <class W>
BLOCKGATE_INLINE void sum_panels(const int16_t* x, const W* weights, int64_t stride, int64_t depth,
                                 FetchAhead& ahead,
                                 Vec<int32_t> (&sums)[SHALLOW_PANELS][PAIR_VECTORS]) {
#pragma GCC unroll 4
  for (int p = 0; p < SHALLOW_PANELS; ++p)
#pragma GCC unroll 4
    for (int v = 0; v < PAIR_VECTORS; ++v) sums[p][v] = Vec<int32_t>{};
  constexpr int PAIRS = 4, LINES = SHALLOW_PANELS * PAIRS * PANEL * int(sizeof(W)) / LINE_BYTES;
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    int32_t pair;
    __builtin_memcpy(&pair, x + k, sizeof pair);
    const auto inputs = (Vec<int16_t>)broadcast_key(pair);
#pragma GCC unroll 4
    for (int p = 0; p < SHALLOW_PANELS; ++p) {
      PanelPairs pairs;
      load_pairs(weights + p * stride + elements_to<W>(k), pairs);
#pragma GCC unroll 4
      for (int v = 0; v < PAIR_VECTORS; ++v) sums[p][v] = add_pairs(sums[p][v], inputs, pairs[v]);
    }
  };
  int64_t k = 0;
  for (; k + 2 * PAIRS <= depth; k += 2 * PAIRS) {
    ahead.lines<LINES>();
#pragma GCC unroll 4
    for (int i = 0; i < PAIRS; ++i) step(k + 2 * i);
  }
  for (; k < depth; k += 2) step(k);
}

template <class W>
BLOCKGATE_INLINE void stream_integers(const StreamArgs& args, int64_t row, int64_t panel_begin,
                                      int64_t panel_end, const OpenBlock* open, int64_t count) {
  const Grid& grid = args.grid;
  const int64_t stride = panel_elements<W>(packed_depth(grid)), block = block_elements<W>(grid);
  const int64_t output = row * grid.block_out + panel_begin * PANEL;
  const int64_t panels = panel_end - panel_begin;
  const int64_t width = smaller(panels * PANEL, outputs_of_row(grid, row) - panel_begin * PANEL);
  const W* weights =
      static_cast<const W*>(args.packed.blocks) + row * grid.cols * block + panel_begin * stride;
  const int64_t group_scales = packed_panels(grid) * PANEL, scales_of_block = block_scales<W>(grid);
  const float* scales =
      args.packed.scale + row * grid.cols * scales_of_block + panel_begin * PANEL;

  // Sums are kept in y, but those of a ragged last panel.
  float* const y = args.y + output;
  if (args.bias != args.y) copy_row(args.bias ? args.bias + output : nullptr, width, y);
  const int64_t whole = width / PANEL;
  float ragged[PANEL] = {};
  __builtin_memcpy(ragged, y + whole * PANEL, (width - whole * PANEL) * sizeof(float));

  // Of the block that is read after this row, if it is one of this weight; else any.
  const int64_t later =
      (reinterpret_cast<int64_t>(args.then) - reinterpret_cast<int64_t>(args.packed.blocks)) /
      (block * int64_t(sizeof(W)));
  const float* then_scale = scales;
  if (args.then && later >= 0 && later < grid.rows * grid.cols)
    then_scale = args.packed.scale + later * scales_of_block + panel_begin * PANEL;

  FetchAhead ahead(reinterpret_cast<const std::byte*>(weights), block * int64_t(sizeof(W)),
                   panels * stride * int64_t(sizeof(W)), open, count, args.then, args.begun);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t col = open[i].col, depth = inputs_of_col(grid, col);
    const float gate = open[i].gate * args.quantised.size[col];
    const int16_t* x = args.quantised.steps.data + col * args.quantised.steps.block_stride;
    const W* panel = weights + col * block;
    const float* scale = scales + col * scales_of_block;
    const float* next_scale = i + 1 < count ? scales + open[i + 1].col * scales_of_block : then_scale;
    int64_t p = 0;
    if (depth <= smaller(SHALLOW, GROUP<W>)) {
      for (; p + SHALLOW_PANELS <= whole; p += SHALLOW_PANELS) {
        Vec<int32_t> sums[SHALLOW_PANELS][PAIR_VECTORS];
        sum_panels(x, panel, stride, depth, ahead, sums);
#pragma GCC unroll 4
        for (int q = 0; q < SHALLOW_PANELS; ++q) {
          __builtin_prefetch(next_scale + q * PANEL);
          float* const target = y + (p + q) * PANEL;
          add_gated<float, int32_t>(target, target, sums[q], gate, scale + q * PANEL);
        }
        panel += SHALLOW_PANELS * stride;
        scale += SHALLOW_PANELS * PANEL;
        next_scale += SHALLOW_PANELS * PANEL;
      }
    }
    for (; p < panels; ++p, panel += stride, scale += PANEL, next_scale += PANEL) {
      float* const target = p < whole ? y + p * PANEL : ragged;
      for (int64_t k = 0, g = 0; k < depth; k += GROUP<W>, g += group_scales) {
        __builtin_prefetch(next_scale + g);
        Vec<int32_t> sum[PAIR_VECTORS];
        sum_panel(x + k, panel + elements_to<W>(k), smaller(GROUP<W>, depth - k), ahead, sum);
        add_gated<float, int32_t>(target, target, sum, gate, scale + g);
      }
    }
  }
  __builtin_memcpy(y + whole * PANEL, ragged, (width - whole * PANEL) * sizeof(float));
}

}  // namespace blockgate::BLOCKGATE_ISA
