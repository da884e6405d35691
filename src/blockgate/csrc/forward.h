// The forward product: weight block outermost, the tokens that opened it inside.
//
// y = bias; then for each open block in ascending order y = fma(gate, acc, y), where acc is the
// tile's chain (int8 blocks: y = fma(gate * scale, acc, y)).
#pragma once

#include "microkernel.h"
#include "pack.h"

namespace blockgate::BLOCKGATE_ISA {

// Panels of one block held as scratch in T: sized to stay in a core's second-level cache.
inline constexpr int64_t SCRATCH_ELEMENTS = 32768;

inline int64_t scratch_panels(const Grid& grid) {
  return larger(1, smaller(packed_panels(grid), SCRATCH_ELEMENTS / (packed_depth(grid) * PANEL)));
}

inline int64_t weight_scratch(const Grid& grid) {
  return scratch_panels(grid) * packed_depth(grid) * PANEL;
}

// From this many tokens on, a task sums its results in a buffer of its own, tokens side by side,
// and copies them out at its end: y is then written once, not once per open block.
inline constexpr int64_t BUFFERED_TOKENS = 32;

template <class T>
int64_t forward_scratch(const Grid& grid, int64_t rows, int64_t tokens) {
  return weight_scratch(grid) +
         (tokens < BUFFERED_TOKENS ? 0 : rows * tokens * packed_panels(grid) * PANEL);
}

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

// First entry of [begin, end) whose token is not below `token`.
template <class T>
int64_t first_entry(const Entry<T>* entries, int64_t begin, int64_t end, int64_t token) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (entries[middle].token < token) begin = middle + 1;
    else end = middle;
  }
  return begin;
}

// The tokens of [token_begin, token_end) that opened a block; null entries: all, with gate 1.
template <class T>
struct BlockUse {
  const Entry<T>* entries;
  int64_t count;
};

template <class T>
BlockUse<T> block_use(const Groups<T>& groups, int64_t block, int64_t token_begin,
                      int64_t token_end) {
  if (!groups.entries) return {nullptr, token_end - token_begin};
  const int64_t end = groups.starts[block + 1];
  const int64_t first = first_entry(groups.entries, groups.starts[block], end, token_begin);
  return {groups.entries + first, first_entry(groups.entries, first, end, token_end) - first};
}

template <class T>
BLOCKGATE_INLINE Results<T> skip_panels(const Results<T>& y, int64_t panels) {
  return {y.data + panels * PANEL, y.stride, y.base + panels * PANEL, y.base_stride};
}

// The outputs [begin, begin + width) of y that a task owns in one of its rows.
struct OutputRange {
  int64_t begin, width;
};

inline OutputRange outputs_of_task(const Grid& grid, const ForwardTask& task, int64_t row) {
  const int64_t first = task.panel_begin * PANEL;
  return {row * grid.block_out + first,
          smaller(task.panel_end * PANEL, outputs_of_row(grid, row)) - first};
}

// The last row of blocks may have fewer panels than the task's others.
inline int64_t panel_end_of(const Grid& grid, const ForwardTask& task, int64_t row) {
  return smaller(task.panel_end, ceil_div(outputs_of_row(grid, row), PANEL));
}

// Null source: zeros. Rows are often one panel wide, too short to call the library for.
template <class T>
BLOCKGATE_INLINE void copy_row(const T* source, int64_t width, T* target) {
  constexpr int L = LANES<T>;
  int64_t i = 0;
  for (; i + L <= width; i += L) store(target + i, source ? load(source + i) : Vec<T>{});
  for (; i < width; ++i) target[i] = source ? source[i] : T(0);
}

// One block whose weights are already T panels or are few enough uses to convert on load.
template <class T, class W>
void forward_packed(const BlockJob<T, W>& job, int64_t panels, T* scratch,
                    int64_t scratch_capacity) {
  if constexpr (sizeof(W) != sizeof(T)) {
    if (job.count > MAX_ROWS<T>) {
      // Many tokens share the block: converting once is cheaper than on every load.
      for (int64_t p = 0; p < panels; p += scratch_capacity) {
        const int64_t n = smaller(scratch_capacity, panels - p);
        const int64_t size = job.depth * PANEL;
        for (int64_t i = 0; i < n; ++i)
          expand(job.panels + (p + i) * job.panel_stride, size, scratch + i * size);
        forward_block<T, T>({job.x, job.x_stride, scratch, size, job.depth,
                             job.scale ? job.scale + p * PANEL : nullptr, skip_panels(job.y, p),
                             job.outputs - p * PANEL, job.entries, job.first_token, job.count},
                            n);
      }
      return;
    }
  }
  forward_block<T, W>(job, panels);
}

template <class T, class W>
void forward_row_packed(const ForwardArgs<T>& args, const ForwardTask& task, int64_t row,
                        Results<T> y, T* scratch) {
  const Grid& grid = args.grid;
  const int64_t stride = packed_depth(grid) * PANEL;
  const int64_t panels = panel_end_of(grid, task, row) - task.panel_begin;
  for (int64_t col = 0; col < grid.cols; ++col) {
    const int64_t block = row * grid.cols + col;
    const BlockUse<T> use = block_use(args.groups, block, task.token_begin, task.token_end);
    if (use.count == 0) continue;
    const int64_t output = task.panel_begin * PANEL;
    const BlockJob<T, W> job{
        args.x.data + col * args.x.block_stride,
        args.x.stride,
        static_cast<const W*>(args.weight) + block * packed_block_size(grid) +
            task.panel_begin * stride,
        stride,
        inputs_of_col(grid, col),
        args.scale ? args.scale + block * packed_panels(grid) * PANEL + output : nullptr,
        y,
        outputs_of_row(grid, row) - output,
        use.entries,
        task.token_begin,
        use.count};
    forward_packed<T, W>(job, panels, scratch, scratch_panels(grid));
  }
}

template <class T>
void forward_row_major(const ForwardArgs<T>& args, const ForwardTask& task, int64_t row,
                       Results<T> y, T* scratch) {
  const Grid& grid = args.grid;
  const int64_t capacity = scratch_panels(grid);
  const int64_t panel_end = panel_end_of(grid, task, row);
  for (int64_t col = 0; col < grid.cols; ++col) {
    const int64_t block = row * grid.cols + col;
    const BlockUse<T> use = block_use(args.groups, block, task.token_begin, task.token_end);
    if (use.count == 0) continue;
    const int64_t depth = inputs_of_col(grid, col);
    for (int64_t panel = task.panel_begin; panel < panel_end; panel += capacity) {
      const int64_t panels = smaller(capacity, panel_end - panel);
      const int64_t outputs = outputs_of_row(grid, row) - panel * PANEL;
      const T* weight = static_cast<const T*>(args.weight) +
                        (row * grid.block_out + panel * PANEL) * grid.in + col * grid.block_in;
      transpose_to_panels(weight, grid.in, smaller(outputs, panels * PANEL), depth, scratch);
      forward_block<T, T>({args.x.data + col * args.x.block_stride, args.x.stride, scratch,
                           depth * PANEL, depth, nullptr,
                           skip_panels(y, panel - task.panel_begin), outputs, use.entries,
                           task.token_begin, use.count},
                          panels);
    }
  }
}

template <class T>
void forward_row(const ForwardArgs<T>& args, const ForwardTask& task, int64_t row, Results<T> y,
                 T* scratch) {
  if constexpr (sizeof(T) == sizeof(float)) {
    switch (args.kind) {
      case WeightKind::packed_float:
        return forward_row_packed<T, T>(args, task, row, y, scratch);
      case WeightKind::packed_bfloat16:
        return forward_row_packed<T, BFloat16>(args, task, row, y, scratch);
      case WeightKind::packed_int8:
        return forward_row_packed<T, int8_t>(args, task, row, y, scratch);
      case WeightKind::row_major:
        break;
    }
  }
  forward_row_major<T>(args, task, row, y, scratch);
}

template <class T>
void forward(const ForwardArgs<T>& args, const ForwardTask& task, T* scratch) {
  const Grid& grid = args.grid;
  const int64_t tokens = task.token_end - task.token_begin;
  // With one column of blocks every output gets at most one part: nothing to sum up.
  const bool buffered = grid.cols > 1 && tokens >= BUFFERED_TOKENS;
  const bool bias_is_base = grid.cols == 1 && !args.groups.entries && args.bias;
  const int64_t width = (task.panel_end - task.panel_begin) * PANEL;
  const int64_t stride = buffered ? width : grid.out;
  T* const buffer = scratch + weight_scratch(grid);
  for (int64_t row = task.row_begin; row < task.row_end; ++row) {
    const OutputRange range = outputs_of_task(grid, task, row);
    const T* bias = args.bias ? args.bias + range.begin : nullptr;
    T* y = args.y + range.begin;
    if (buffered) y = buffer + ((row - task.row_begin) * tokens - task.token_begin) * stride;
    if (!bias_is_base)
      for (int64_t t = task.token_begin; t < task.token_end; ++t)
        copy_row(bias, range.width, y + t * stride);
    forward_row<T>(args, task, row,
                   bias_is_base ? Results<T>{y, stride, bias, 0} : Results<T>{y, stride, y, stride},
                   scratch);
  }
  if (!buffered) return;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t row = task.row_begin; row < task.row_end; ++row) {
      const OutputRange range = outputs_of_task(grid, task, row);
      copy_row(buffer + ((row - task.row_begin) * tokens + t) * width, range.width,
               args.y + (task.token_begin + t) * grid.out + range.begin);
    }
}

}  // namespace blockgate::BLOCKGATE_ISA
