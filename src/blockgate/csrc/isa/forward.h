// The forward product: weight block outermost, the tokens that opened it inside.
//
// y = bias; then for each open block in ascending order y = fma(gate, acc, y), where acc is the
// tile's chain. Integer blocks: y = fma(gate * step size * scale, acc, y) for each group of inputs
// in turn, acc exact and then rounded.
#pragma once

#include "isa/forward_block.h"
#include "isa/pack.h"

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

// First entry of [begin, end) whose token is not below `token`.
template <class T>
int64_t first_entry(const Entry<T>* entries, int64_t begin, int64_t end, int64_t token) {
  // Tasks often have all tokens: the search would only find the ends.
  if (begin == end || entries[begin].token >= token) return begin;
  if (entries[end - 1].token < token) return end;
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

// Null source: zeros. Rows are often one panel wide or less, too short to call the library for.
template <class T>
BLOCKGATE_INLINE void copy_row(const T* source, int64_t width, T* target) {
  constexpr int L = LANES<T>;
  int64_t i = 0;
  for (; i + L <= width; i += L) store(target + i, source ? load(source + i) : Vec<T>{});
  for (; i + 4 <= width; i += 4) {
    Part<T, 4> values = {};
    if (source) __builtin_memcpy(&values, source + i, sizeof values);
    __builtin_memcpy(target + i, &values, sizeof values);
  }
  for (; i < width; ++i) target[i] = source ? source[i] : T(0);
}

// One block whose weights are computed in as they are, or used so rarely that each load converts.
template <class T, class W>
void forward_packed(const Grid& grid, const BlockJob<T, W>& job, int64_t panels, T* scratch) {
  const int64_t scratch_capacity = scratch_panels(grid), scale_stride = packed_panels(grid) * PANEL;
  using Math = Arithmetic<T, W>;
  using Expanded = typename Math::Expanded;
  if constexpr (sizeof(W) != sizeof(Expanded)) {
    if (job.count > MAX_ROWS<T>) {
      // Many tokens share the block: converting once is cheaper than on every load.
      for (int64_t p = 0; p < panels; p += scratch_capacity) {
        const int64_t n = smaller(scratch_capacity, panels - p);
        const int64_t size = (job.depth + (Math::IN_PAIRS ? job.depth % 2 : 0)) * PANEL;
        Expanded* const expanded = reinterpret_cast<Expanded*>(scratch);
        for (int64_t i = 0; i < n; ++i)
          expand(job.panels + (p + i) * job.panel_stride, job.depth, expanded + i * size);
        forward_groups<W, T, Expanded>(
            {job.x, job.x_stride, expanded, size, job.depth,
             job.scale ? job.scale + p * PANEL : nullptr, skip_panels(job.y, p),
             job.outputs - p * PANEL, job.entries, job.first_token, job.count, job.step_size},
            n, scale_stride);
      }
      return;
    }
  }
  forward_groups<W, T, W>(job, panels, scale_stride);
}

#if defined(BLOCKGATE_VNNI)
// One block for inputs in bytes: always expanded, which is needed for its sums anyway. Its quads and
// sums take no more memory than its weights as float would, since blocks have at least 4 inputs.
inline void forward_bytes(const Grid& grid, const QuantisedRows& inputs, int64_t col,
                          const BlockJob<float, Int8Pair>& job, int64_t panels, float* scratch) {
  const int64_t capacity = scratch_panels(grid), size = panel_elements<Int8Quad>(job.depth);
  auto* const quads = reinterpret_cast<Int8Quad*>(scratch);
  auto* const sums = reinterpret_cast<int32_t*>(quads + capacity * size);
  for (int64_t p = 0; p < panels; p += capacity) {
    const int64_t n = smaller(capacity, panels - p);
    for (int64_t i = 0; i < n; ++i)
      expand_to_quads(job.panels + (p + i) * job.panel_stride, job.depth, quads + i * size,
                      sums + i * PANEL);
    forward_block<float, Int8Quad>(
        {inputs.bytes.data + col * inputs.bytes.block_stride, inputs.bytes.stride, quads, size,
         job.depth, job.scale + p * PANEL, skip_panels(job.y, p), job.outputs - p * PANEL,
         job.entries, job.first_token, job.count, job.step_size, inputs.zero, sums},
        n);
  }
}
#endif

template <class W, class Args>
BLOCKGATE_INLINE const auto& inputs_for(const Args& args) {
  if constexpr (Arithmetic<float, W>::IN_PAIRS) return args.quantised.steps;
  else return args.x;
}

template <class T, class W>
void forward_row_packed(const ForwardArgs<T>& args, const ForwardTask& task, int64_t row,
                        Results<T> y, T* scratch) {
  const Grid& grid = args.grid;
  const int64_t stride = panel_elements<W>(packed_depth(grid));
  const int64_t panels = panel_end_of(grid, task, row) - task.panel_begin;
  for (int64_t col = 0; col < grid.cols; ++col) {
    const int64_t block = row * grid.cols + col;
    const BlockUse<T> use = block_use(args.groups, block, task.token_begin, task.token_end);
    if (use.count == 0) continue;
    const int64_t output = task.panel_begin * PANEL;
    const auto& x = inputs_for<W>(args);
    const BlockJob<T, W> job{
        x.data + col * x.block_stride,
        x.stride,
        static_cast<const W*>(args.packed.blocks) + block * block_elements<W>(grid) +
            task.panel_begin * stride,
        stride,
        inputs_of_col(grid, col),
        args.packed.scale ? args.packed.scale + block * block_scales<W>(grid) + output : nullptr,
        y,
        outputs_of_row(grid, row) - output,
        use.entries,
        task.token_begin,
        use.count,
        args.quantised.size + col * args.quantised.tokens};
#if defined(BLOCKGATE_VNNI)
    if constexpr (std::is_same_v<W, Int8Pair>) {
      if (args.quantised.zero) {
        forward_bytes(grid, args.quantised, col, job, panels, scratch);
        continue;
      }
    }
#endif
    forward_packed<T, W>(grid, job, panels, scratch);
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
      const T* weight = args.row_major + (row * grid.block_out + panel * PANEL) * grid.in +
                        col * grid.block_in;
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
  if (args.row_major) return forward_row_major<T>(args, task, row, y, scratch);
  visit_format<T>(args.packed.format, [&](auto stored) {
    forward_row_packed<T, typename decltype(stored)::type>(args, task, row, y, scratch);
  });
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
