// The gradients of the forward product, with the same saving.
//
// grad_x and grad_gates share one product per open (token, block): acc = W_block^T grad_y, then
// grad_gate = x . acc and grad_x += gate * acc. grad_weight is one small product per block over
// the tokens that opened it. Each value is written by one task, in a fixed order.
#pragma once

#include "forward.h"

namespace blockgate::BLOCKGATE_ISA {

// Outputs per tile of grad_weight: divides the usual block sizes.
template <class T>
inline constexpr int GRAD_ROWS = MAX_ROWS<T> >= 4 ? 4 : (MAX_ROWS<T> >= 2 ? 2 : 1);

// Tokens gathered at once for grad_weight: the gathered rows stay in the second-level cache.
inline int64_t gathered_tokens(const Grid& grid) {
  const int64_t per_token = packed_depth(grid) + smaller(grid.block_out, grid.out);
  return larger(16, smaller(256, SCRATCH_ELEMENTS / per_token));
}

template <class T>
int64_t backward_scratch(const Grid& grid) {
  const int64_t outputs = smaller(grid.block_out, grid.out);
  const int64_t inputs = ceil_div(packed_depth(grid), PANEL) * PANEL;
  const int64_t gathered =
      gathered_tokens(grid) * (inputs + ceil_div(outputs, GRAD_ROWS<T>) * GRAD_ROWS<T>);
  return larger(inputs * outputs, gathered);
}

// One block seen by grad_x and grad_gates.
template <class T>
struct InputGradJob {
  const T* grad_y;  // at the block's first output
  int64_t grad_y_stride;
  const T* panels;  // [input / 16][output][input % 16]
  int64_t outputs, inputs;
  const T* x;  // at the block's first input, as grad_x
  int64_t x_stride;
  T* grad_x;
  int64_t grad_x_stride;
  T* grad_gates;
  int64_t slots;
  const Entry<T>* entries;
};

template <int ROWS, class T>
BLOCKGATE_INLINE void input_grad_tile(const InputGradJob<T>& job, int64_t panel, int64_t first) {
  constexpr int VECTORS = PANEL_VECTORS<T>, L = LANES<T>;
  const T* rows[ROWS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
    rows[m] = job.grad_y + job.entries[first + m].token * job.grad_y_stride;
  Tile<T, ROWS, 1> tile;
  tile_multiply<1>(tile, rows, job.panels + panel * job.outputs * PANEL, 0, job.outputs);

  const int64_t input = panel * PANEL, width = smaller(PANEL, job.inputs - input);
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) {
    const Entry<T>& entry = job.entries[first + m];
    const Vec<T>(&acc)[VECTORS] = tile.acc[m];
    if (job.grad_gates) {
      const T* x = job.x + entry.token * job.x_stride + input;
      T edge[PANEL] = {};
      if (width < PANEL) {
        __builtin_memcpy(edge, x, width * sizeof(T));
        x = edge;
      }
      Vec<T> products{};
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; ++v)
        products = multiply_add(load(x + v * L), acc[v], products);
      T& grad_gate = job.grad_gates[entry.token * job.slots + entry.slot];
      const T sum = horizontal_sum<T>(products);
      grad_gate = panel == 0 ? sum : grad_gate + sum;
    }
    if (job.grad_x)
      add_gated<T>(job.grad_x + entry.token * job.grad_x_stride + input, acc, entry.gate, nullptr,
                   width);
  }
}

template <class T>
void input_grad_block(const InputGradJob<T>& job, int64_t count) {
  const EvenSplit split = even_split(count, MAX_ROWS<T>);
  for (int64_t panel = 0; panel * PANEL < job.inputs; ++panel) {
    int64_t first = 0;
    for (int64_t part = 0; part < split.parts; ++part) {
      const int64_t rows = split.size + (part < split.larger_parts);
      with_row_count<T>(rows, [&](auto n) {
        input_grad_tile<decltype(n)::value>(job, panel, first);
      });
      first += rows;
    }
  }
}

template <class T>
void input_grad(const BackwardArgs<T>& args, const InputGradTask& task, T* scratch) {
  const Grid& grid = args.grid;
  const int64_t input = task.col * grid.block_in, inputs = inputs_of_col(grid, task.col);
  if (args.grad_x)
    for (int64_t t = task.token_begin; t < task.token_end; ++t)
      __builtin_memset(args.grad_x + t * grid.in + input, 0, inputs * sizeof(T));
  for (int64_t row = 0; row < grid.rows; ++row) {
    const BlockUse<T> use =
        block_use(args.groups, row * grid.cols + task.col, task.token_begin, task.token_end);
    if (use.count == 0) continue;
    const int64_t output = row * grid.block_out, outputs = outputs_of_row(grid, row);
    copy_to_panels(args.weight + output * grid.in + input, grid.in, outputs, inputs, scratch);
    input_grad_block<T>({args.grad_y + output, args.grad_y_stride, scratch, outputs, inputs,
                         args.x + input, args.x_stride,
                         args.grad_x ? args.grad_x + input : nullptr, grid.in, args.grad_gates,
                         args.slots, use.entries},
                        use.count);
  }
}

// grad_weight tile: ROWS outputs x PANELS panels of inputs, summed over the gathered tokens.
template <int ROWS, int PANELS, class T>
BLOCKGATE_INLINE void weight_grad_tile(const T* outputs, const T* inputs, int64_t panel_stride,
                                       int64_t tokens, T* grad, int64_t stride, int64_t height,
                                       int64_t width, bool accumulate) {
  constexpr int L = LANES<T>;
  const T* rows[ROWS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) rows[m] = outputs + m;
  Tile<T, ROWS, PANELS> tile;
  tile_multiply<ROWS>(tile, rows, inputs, panel_stride, tokens);
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) {
    if (m >= height) break;
    T values[PANELS * PANEL];
#pragma GCC unroll 16
    for (int j = 0; j < tile.WIDTH; ++j) {
      if (width >= PANELS * PANEL) {
        T* target = grad + m * stride + j * L;
        store(target, accumulate ? load(target) + tile.acc[m][j] : tile.acc[m][j]);
      } else {
        store(values + j * L, tile.acc[m][j]);
      }
    }
    if (width < PANELS * PANEL)
      for (int64_t i = 0; i < width; ++i)
        grad[m * stride + i] = accumulate ? grad[m * stride + i] + values[i] : values[i];
  }
}

// gathered_y: [output / ROWS][token][output % ROWS]; gathered_x: [input / 16][token][input % 16].
template <class T>
void gather_tokens(const BackwardArgs<T>& args, const Entry<T>* entries, int64_t tokens,
                   int64_t output, int64_t outputs, int64_t input, int64_t inputs, T* gathered_y,
                   T* gathered_x) {
  constexpr int ROWS = GRAD_ROWS<T>, L = LANES<T>;
  for (int64_t t = 0; t < tokens; ++t) {
    const T* grad_y = args.grad_y + entries[t].token * args.grad_y_stride + output;
    T* to_y = gathered_y + t * ROWS;
    int64_t o = 0;
    for (; o + ROWS <= outputs; o += ROWS, to_y += tokens * ROWS)
      __builtin_memcpy(to_y, grad_y + o, ROWS * sizeof(T));
    if (o < outputs)
      for (int64_t i = 0; i < ROWS; ++i) to_y[i] = o + i < outputs ? grad_y[o + i] : T(0);

    const T* x = args.x + entries[t].token * args.x_stride + input;
    const Vec<T> gate = broadcast(entries[t].gate);
    T* to_x = gathered_x + t * PANEL;
    int64_t i = 0;
    for (; i + PANEL <= inputs; i += PANEL, to_x += tokens * PANEL)
#pragma GCC unroll 16
      for (int v = 0; v < PANEL_VECTORS<T>; ++v) store(to_x + v * L, gate * load(x + i + v * L));
    if (i < inputs)
      for (int64_t j = 0; j < PANEL; ++j)
        to_x[j] = i + j < inputs ? entries[t].gate * x[i + j] : T(0);
  }
}

template <int PANELS, class T>
BLOCKGATE_INLINE void weight_grad_panels(const T* gathered_y, const T* gathered_x, int64_t tokens,
                                         int64_t outputs, int64_t inputs, int64_t panel, T* grad,
                                         int64_t stride, bool accumulate) {
  constexpr int ROWS = GRAD_ROWS<T>;
  const int64_t panels = ceil_div(inputs, PANEL);
  for (; panel + PANELS <= panels; panel += PANELS)
    for (int64_t o = 0; o < outputs; o += ROWS)
      weight_grad_tile<ROWS, PANELS>(gathered_y + o * tokens, gathered_x + panel * tokens * PANEL,
                                     tokens * PANEL, tokens, grad + o * stride + panel * PANEL,
                                     stride, outputs - o, inputs - panel * PANEL, accumulate);
  if constexpr (PANELS > 1)
    weight_grad_panels<PANELS / 2>(gathered_y, gathered_x, tokens, outputs, inputs, panel, grad,
                                   stride, accumulate);
}

template <class T>
void weight_grad(const BackwardArgs<T>& args, int64_t block, T* scratch) {
  const Grid& grid = args.grid;
  const int64_t row = block / grid.cols, col = block % grid.cols;
  const int64_t output = row * grid.block_out, outputs = outputs_of_row(grid, row);
  const int64_t input = col * grid.block_in, inputs = inputs_of_col(grid, col);
  T* grad = args.grad_weight + output * grid.in + input;
  const int64_t begin = args.groups.starts[block], end = args.groups.starts[block + 1];
  if (begin == end) {
    for (int64_t o = 0; o < outputs; ++o)
      __builtin_memset(grad + o * grid.in, 0, inputs * sizeof(T));
    return;
  }
  const int64_t limit = gathered_tokens(grid);
  for (int64_t first = begin; first < end; first += limit) {
    const int64_t tokens = smaller(limit, end - first);
    T* gathered_x = scratch;
    T* gathered_y = scratch + ceil_div(inputs, PANEL) * PANEL * tokens;
    gather_tokens(args, args.groups.entries + first, tokens, output, outputs, input, inputs,
                  gathered_y, gathered_x);
    weight_grad_panels<tile_panels<T>(GRAD_ROWS<T>)>(gathered_y, gathered_x, tokens, outputs,
                                                     inputs, 0, grad, grid.in, first > begin);
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
