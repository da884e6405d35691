// One token: each open block is read exactly once, as a stream, into register accumulators.
//
// The time is that of reading the open blocks, so the kernel's only art is to keep the memory
// system busy: long runs, and prefetching that runs on into the next open block.
#pragma once

#include "isa/stream_integers.h"

namespace blockgate::BLOCKGATE_ISA {

inline constexpr int STREAM_PANELS = tile_panels<float>(1);
// Steps of k in one cache line of a panel, and how many the prefetch runs ahead: the same number of
// bytes in every panel, however narrow the weights.
template <class W>
inline constexpr int64_t STEPS_PER_LINE = LINE_BYTES / (PANEL * int64_t(sizeof(W)));
template <class W>
inline constexpr int64_t PREFETCH_STEPS = 24 * STEPS_PER_LINE<W>;

// Steps [k, end) of one block, fetching a line of every panel of `ahead` per line that is read.
template <int PANELS, class W>
BLOCKGATE_INLINE void stream_steps(Tile<float, 1, PANELS>& tile, const float* const (&rows)[1],
                                   const W* panels, int64_t panel_stride, int64_t k, int64_t end,
                                   const W* ahead) {
  constexpr int LINE = int(STEPS_PER_LINE<W>);
  for (; k + LINE <= end; k += LINE, ahead += elements_to<W>(LINE)) {
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; ++p) __builtin_prefetch(ahead + p * panel_stride);
#pragma GCC unroll 4
    for (int s = 0; s < LINE; ++s) tile_step<1>(tile, rows, panels, panel_stride, k + s);
  }
  for (; k < end; ++k) tile_step<1>(tile, rows, panels, panel_stride, k);
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

  float y[PANELS * PANEL] = {};
  if (args.bias) __builtin_memcpy(y, args.bias + output, width * sizeof(float));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t col = open[i].col, depth = inputs_of_col(grid, col);
    const W* next = i + 1 < count ? weight + open[i + 1].col * block
                                  : static_cast<const W*>(args.then);
    const float* const rows[1] = {args.x + col * grid.block_in};
    const W* panels = weight + col * block;
    // From here on the prefetch runs in the next block; where nothing is known of it, in this one.
    const int64_t turn =
        larger(0, depth - PREFETCH_STEPS<W>) / STEPS_PER_LINE<W> * STEPS_PER_LINE<W>;
    Tile<float, 1, PANELS> tile;
    tile_clear(tile);
    stream_steps<PANELS, W>(tile, rows, panels, stride, 0, turn,
                            panels + elements_to<W>(PREFETCH_STEPS<W>));
    stream_steps<PANELS, W>(tile, rows, panels, stride, turn, depth, next ? next : panels);
    add_gated<float, float>(y, y, tile.acc[0], open[i].gate, nullptr);
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
    if constexpr (Arithmetic<float, W>::IN_PAIRS)
      stream_integers<W>(args, row, panel_begin, panel_end, open, count);
    else
      stream_row<STREAM_PANELS, W>(args, row, panel_begin, panel_end, open, count);
  });
}

}  // namespace blockgate::BLOCKGATE_ISA
