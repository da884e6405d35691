// One token: each open block is read exactly once, as a stream, into register accumulators.
//
// The time is that of reading the open blocks, so the kernel's only art is to keep the memory
// system busy: long runs, and prefetching that runs on into the next open block.
#pragma once

#include "isa/forward.h"

namespace blockgate::BLOCKGATE_ISA {

inline constexpr int STREAM_PANELS = tile_panels<float>(1);
// Panels in one tile, and those of a block that are read before the next block. Chains of float
// sums need company to fill the pipeline. Integer sums don't: one panel after the other makes a
// block one run of memory, where several at once would be as many streams of two kilobytes.
template <class W>
inline constexpr int PANELS_AT_ONCE = Arithmetic<float, W>::IN_PAIRS ? 1 : STREAM_PANELS;
template <class W>
inline constexpr int PANELS_OF_BLOCK = Arithmetic<float, W>::IN_PAIRS ? 8 : STREAM_PANELS;
// Steps of k in one cache line of a panel, and how many the prefetch runs ahead: the same number of
// bytes in every panel, however narrow the weights.
template <class W>
inline constexpr int64_t STEPS_PER_LINE = 64 * WEIGHTS<W> / (PANEL * int64_t(sizeof(W)));
template <class W>
inline constexpr int64_t PREFETCH_STEPS = 24 * STEPS_PER_LINE<W>;

template <class W>
using StreamInput = typename Arithmetic<float, W>::Input;
template <class W>
using StreamSum = typename Arithmetic<float, W>::Sum;

// Steps [k, end) of one block, fetching a line of every panel of `ahead` per line that is read.
template <int PANELS, class W>
BLOCKGATE_INLINE void stream_steps(Tile<StreamSum<W>, 1, PANELS>& tile,
                                   const StreamInput<W>* const (&rows)[1], const W* panels,
                                   int64_t panel_stride, int64_t k, int64_t end, const W* ahead) {
  constexpr int LINE = int(STEPS_PER_LINE<W>), STEP = Arithmetic<float, W>::IN_PAIRS ? 2 : 1;
  const auto step = [&](int64_t at, [[maybe_unused]] int64_t partner)
                        __attribute__((always_inline)) {
    if constexpr (STEP == 2) pair_step(tile, rows, panels, panel_stride, at, partner);
    else tile_step<1>(tile, rows, panels, panel_stride, at);
  };
  for (; k + LINE <= end; k += LINE, ahead += elements_to<W>(LINE)) {
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; ++p) __builtin_prefetch(ahead + p * panel_stride);
#pragma GCC unroll 4
    for (int s = 0; s < LINE; s += STEP) step(k + s, PANEL);
  }
  for (; k < end; k += STEP) step(k, k + 1 < end ? PANEL : 0);
}

// Inputs [begin, end) of one block of `depth` inputs; `next` is what is read after the block, null:
// nothing is known of it.
template <int PANELS, class W>
BLOCKGATE_INLINE void stream_inputs(Tile<StreamSum<W>, 1, PANELS>& tile, const StreamInput<W>* x,
                                    const W* panels, int64_t panel_stride, int64_t begin,
                                    int64_t end, int64_t depth, const W* next) {
  const StreamInput<W>* const rows[1] = {x};
  tile_clear(tile);
  // From here on the prefetch runs in the next block. A whole number of lines, so that the second
  // part begins with one.
  const int64_t inside = larger(0, depth - PREFETCH_STEPS<W>) / STEPS_PER_LINE<W> * STEPS_PER_LINE<W>;
  const int64_t turn = larger(begin, smaller(end, inside));
  stream_steps<PANELS, W>(tile, rows, panels, panel_stride, begin, turn,
                          panels + elements_to<W>(begin + PREFETCH_STEPS<W>));
  stream_steps<PANELS, W>(tile, rows, panels, panel_stride, turn, end,
                          (next ? next : panels) + elements_to<W>(larger(0, turn - inside)));
  if constexpr (Arithmetic<float, W>::IN_PAIRS) in_order(tile);
}

template <int PANELS, class W>
BLOCKGATE_INLINE void stream_panels(const StreamArgs& args, int64_t row, int64_t panel,
                                    const OpenBlock* open, int64_t count) {
  const Grid& grid = args.grid;
  const int64_t stride = panel_elements<W>(packed_depth(grid)), block = block_elements<W>(grid);
  const int64_t output = row * grid.block_out + panel * PANEL;
  const int64_t width = smaller(PANELS * PANEL, outputs_of_row(grid, row) - panel * PANEL);
  const W* weight =
      static_cast<const W*>(args.packed.blocks) + row * grid.cols * block + panel * stride;
  const float* scale = args.packed.scale
      ? args.packed.scale + row * grid.cols * block_scales<W>(grid) + panel * PANEL
      : nullptr;

  float y[PANELS * PANEL] = {};
  if (args.bias) __builtin_memcpy(y, args.bias + output, width * sizeof(float));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t col = open[i].col, depth = inputs_of_col(grid, col);
    const W* next = i + 1 < count ? weight + open[i + 1].col * block
                                  : static_cast<const W*>(args.then);
    float gate = open[i].gate;
    const StreamInput<W>* x;
    if constexpr (Arithmetic<float, W>::IN_PAIRS) {
      gate *= args.quantised.size[col];
      x = args.quantised.steps.data + col * args.quantised.steps.block_stride;
    } else {
      x = args.x + col * grid.block_in;
    }
    const W* panels = weight + col * block;
    constexpr int AT_ONCE = smaller(PANELS, PANELS_AT_ONCE<W>);
    for (int p = 0; p < PANELS; p += AT_ONCE, panels += AT_ONCE * stride) {
      const float* scales = scale ? scale + col * block_scales<W>(grid) + p * PANEL : nullptr;
      // Once, where all inputs share a scale or there is none.
      for (int64_t k = 0; k < depth; k += GROUP<W>) {
        Tile<StreamSum<W>, 1, AT_ONCE> tile;
        stream_inputs<AT_ONCE, W>(tile, x, panels, stride, k, smaller(k + GROUP<W>, depth), depth,
                                  p + AT_ONCE < PANELS ? panels + AT_ONCE * stride : next);
        add_gated<float, StreamSum<W>>(y + p * PANEL, y + p * PANEL, tile.acc[0], gate, scales);
        if (scales) scales += packed_panels(grid) * PANEL;
      }
    }
  }
  __builtin_memcpy(args.y + output, y, width * sizeof(float));
}

template <int PANELS, class W>
BLOCKGATE_INLINE void stream_row(const StreamArgs& args, int64_t row, int64_t panel,
                                 int64_t panel_end, const OpenBlock* open, int64_t count) {
  for (; panel + PANELS <= panel_end; panel += PANELS)
    stream_panels<PANELS, W>(args, row, panel, open, count);
  if constexpr (PANELS > 1)
    stream_row<PANELS / 2, W>(args, row, panel, panel_end, open, count);
}

inline void stream(const StreamArgs& args, int64_t row, int64_t panel_begin, int64_t panel_end,
                   const OpenBlock* open, int64_t count) {
  visit_format<float>(args.packed.format, [&](auto stored) {
    using W = typename decltype(stored)::type;
    stream_row<PANELS_OF_BLOCK<W>, W>(args, row, panel_begin, panel_end, open, count);
  });
}

}  // namespace blockgate::BLOCKGATE_ISA
