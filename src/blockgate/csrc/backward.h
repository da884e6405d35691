// The gradients of the forward product, with the same saving.
//
// grad_x and grad_gates share one product per open (token, block): acc = W_block^T grad_y, then
// grad_gate = x . acc and grad_x += gate * acc. grad_weight is one small product per block over
// the tokens that opened it. Each value is written by one task, in a fixed order.
#pragma once

#include "forward.h"

namespace blockgate::BLOCKGATE_ISA {

// Outputs per tile of grad_weight.
template <class T>
inline constexpr int GRAD_ROWS = MAX_ROWS<T>;

// Tokens gathered at once for grad_weight: the gathered rows stay in the second-level cache.
inline int64_t gathered_tokens(const Grid& grid) {
  const int64_t per_token = packed_depth(grid) + smaller(grid.block_out, grid.out);
  return larger(16, smaller(256, SCRATCH_ELEMENTS / per_token));
}

// Distance between gathered panels of `width` values a token. Never a power of two: the panels
// are written side by side and must not evict each other.
constexpr int64_t gathered_stride(int64_t tokens, int64_t width) {
  return ceil_div(tokens * width, PANEL) * PANEL + PANEL;
}

template <class T>
int64_t weight_grad_scratch(const Grid& grid) {
  const int64_t outputs = smaller(grid.block_out, grid.out), tokens = gathered_tokens(grid);
  return ceil_div(packed_depth(grid), PANEL) * gathered_stride(tokens, PANEL) +
         ceil_div(outputs, GRAD_ROWS<T>) * gathered_stride(tokens, GRAD_ROWS<T>);
}

inline int64_t padded_inputs(const Grid& grid) {
  return ceil_div(packed_depth(grid), PANEL) * PANEL;
}

template <class T>
int64_t input_grad_scratch(const Grid& grid, int64_t tokens) {
  return padded_inputs(grid) *
         (smaller(grid.block_out, grid.out) + (tokens < BUFFERED_TOKENS ? 0 : tokens));
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
  int64_t count;
};

// Some tokens, over all panels of the block.
template <int ROWS, class T>
BLOCKGATE_INLINE void input_grad_tile(const InputGradJob<T>& job, const Entry<T>* entries) {
  constexpr int VECTORS = PANEL_VECTORS<T>, L = LANES<T>;
  const T* rows[ROWS];
  Vec<T> products[ROWS] = {};
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) rows[m] = job.grad_y + entries[m].token * job.grad_y_stride;
  if (entries + 2 * ROWS <= job.entries + job.count) {
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const int64_t token = entries[ROWS + m].token;
      __builtin_prefetch(job.grad_y + token * job.grad_y_stride);
      __builtin_prefetch(job.x + token * job.x_stride);
      if (job.grad_x) __builtin_prefetch(job.grad_x + token * job.grad_x_stride);
    }
  }
  for (int64_t input = 0; input < job.inputs; input += PANEL) {
    Tile<T, ROWS, 1> tile;
    tile_multiply<1>(tile, rows, job.panels + input * job.outputs, 0, job.outputs);
    const int64_t width = smaller(PANEL, job.inputs - input);
    if (job.grad_gates) {
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) {
        const T* x = job.x + entries[m].token * job.x_stride + input;
        T edge[PANEL];
        if (width < PANEL) {
          for (int64_t i = 0; i < PANEL; ++i) edge[i] = i < width ? x[i] : T(0);
          x = edge;
        }
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v)
          products[m] = multiply_add(load(x + v * L), tile.acc[m][v], products[m]);
      }
    }
    if (job.grad_x) {
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) {
        T* grad_x = job.grad_x + entries[m].token * job.grad_x_stride + input;
        add_gated<T>(grad_x, grad_x, tile.acc[m], entries[m].gate, nullptr, width);
      }
    }
  }
  if (job.grad_gates) {
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
      job.grad_gates[entries[m].token * job.slots + entries[m].slot] =
          horizontal_sum<T>(products[m]);
  }
}

template <class T>
void input_grad_block(const InputGradJob<T>& job) {
  const EvenSplit split = even_split(job.count, MAX_ROWS<T>);
  const Entry<T>* entries = job.entries;
  for (int64_t part = 0; part < split.parts; ++part) {
    const int64_t rows = split.size + (part < split.larger_parts);
    with_row_count<T>(rows,
                      [&](auto n) { input_grad_tile<decltype(n)::value>(job, entries); });
    entries += rows;
  }
}

template <class T>
void input_grad(const BackwardArgs<T>& args, const InputGradTask& task, T* scratch) {
  const Grid& grid = args.grid;
  const int64_t input = task.col * grid.block_in, inputs = inputs_of_col(grid, task.col);
  const bool buffered = task.token_end - task.token_begin >= BUFFERED_TOKENS;
  const int64_t stride = buffered ? padded_inputs(grid) : grid.in;
  T* grad_x = nullptr;
  if (args.grad_x) {
    grad_x = buffered ? scratch + padded_inputs(grid) * smaller(grid.block_out, grid.out) -
                            task.token_begin * stride
                      : args.grad_x + input;
    for (int64_t t = task.token_begin; t < task.token_end; ++t)
      copy_row<T>(nullptr, inputs, grad_x + t * stride);
  }
  for (int64_t row = 0; row < grid.rows; ++row) {
    const BlockUse<T> use =
        block_use(args.groups, row * grid.cols + task.col, task.token_begin, task.token_end);
    if (use.count == 0) continue;
    const int64_t outputs = outputs_of_row(grid, row);
    copy_to_panels(args.weight + row * grid.block_out * grid.in + input, grid.in, outputs, inputs,
                   scratch);
    input_grad_block<T>({args.grad_y.data + row * args.grad_y.block_stride, args.grad_y.stride,
                         scratch, outputs, inputs, args.x.data + task.col * args.x.block_stride,
                         args.x.stride, grad_x, stride, args.grad_gates, args.slots, use.entries,
                         use.count});
  }
  if (grad_x && buffered)
    for (int64_t t = task.token_begin; t < task.token_end; ++t)
      copy_row(grad_x + t * stride, inputs, args.grad_x + t * grid.in + input);
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

// The rows of one block's tokens: grad_y as [output / ROWS][token][output % ROWS] and gate * x as
// [input / 16][token][input % 16].
template <class T>
struct Gathered {
  T* grad_y;
  int64_t grad_y_stride;
  T* x;
  int64_t x_stride;
  int64_t tokens, outputs, inputs;
};

template <class T>
void gather_tokens(const Gathered<T>& gathered, const T* grad_y, int64_t grad_y_stride, const T* x,
                   int64_t x_stride, const Entry<T>* entries) {
  constexpr int ROWS = GRAD_ROWS<T>, L = LANES<T>;
  // Tokens are anywhere, so their rows are fetched a little ahead.
  constexpr int64_t AHEAD = 3, LINE = 64 / sizeof(T);
  const int64_t outputs = gathered.outputs, inputs = gathered.inputs;
  for (int64_t t = 0; t < gathered.tokens; ++t) {
    const T* from_y = grad_y + entries[t].token * grad_y_stride;
    if (t + AHEAD < gathered.tokens) {
      const int64_t token = entries[t + AHEAD].token;
      for (int64_t o = 0; o < outputs; o += LINE)
        __builtin_prefetch(grad_y + token * grad_y_stride + o);
      for (int64_t i = 0; i < inputs; i += LINE) __builtin_prefetch(x + token * x_stride + i);
    }
    T* to_y = gathered.grad_y + t * ROWS;
    int64_t o = 0;
    // Whole vectors where they fit: what they write beyond this token's place is overwritten by
    // the next token or falls into the gap between panels.
    if constexpr (ROWS <= L)
      for (; o + L <= outputs; o += ROWS, to_y += gathered.grad_y_stride)
        store(to_y, load(from_y + o));
    for (; o + ROWS <= outputs; o += ROWS, to_y += gathered.grad_y_stride)
      __builtin_memcpy(to_y, from_y + o, ROWS * sizeof(T));
    // The rest of the last group stays as it is: those results are never stored.
    if (outputs - o >= 4) {
      __builtin_memcpy(to_y, from_y + o, 4 * sizeof(T));
      o += 4;
      to_y += 4;
    }
    for (; o < outputs; ++o) *to_y++ = from_y[o];

    const T* from_x = x + entries[t].token * x_stride;
    const T gate = entries[t].gate;
    T* to_x = gathered.x + t * PANEL;
    int64_t i = 0;
    for (; i + PANEL <= inputs; i += PANEL, to_x += gathered.x_stride)
#pragma GCC unroll 16
      for (int v = 0; v < PANEL_VECTORS<T>; ++v)
        store(to_x + v * L, broadcast(gate) * load(from_x + i + v * L));
    if (i < inputs)
      for (int64_t j = 0; j < PANEL; ++j) to_x[j] = i + j < inputs ? gate * from_x[i + j] : T(0);
  }
}

template <int PANELS, class T>
BLOCKGATE_INLINE void weight_grad_panels(const Gathered<T>& gathered, int64_t panel, T* grad,
                                         int64_t stride, bool accumulate) {
  constexpr int ROWS = GRAD_ROWS<T>;
  const int64_t panels = ceil_div(gathered.inputs, PANEL);
  for (; panel + PANELS <= panels; panel += PANELS)
    for (int64_t o = 0; o < gathered.outputs; o += ROWS)
      weight_grad_tile<ROWS, PANELS>(
          gathered.grad_y + o / ROWS * gathered.grad_y_stride,
          gathered.x + panel * gathered.x_stride, gathered.x_stride, gathered.tokens,
          grad + o * stride + panel * PANEL, stride, gathered.outputs - o,
          gathered.inputs - panel * PANEL, accumulate);
  if constexpr (PANELS > 1)
    weight_grad_panels<PANELS / 2>(gathered, panel, grad, stride, accumulate);
}

template <class T>
void weight_grad(const BackwardArgs<T>& args, int64_t block, T* scratch) {
  const Grid& grid = args.grid;
  const int64_t row = block / grid.cols, col = block % grid.cols;
  const int64_t outputs = outputs_of_row(grid, row), inputs = inputs_of_col(grid, col);
  T* grad = args.grad_weight + row * grid.block_out * grid.in + col * grid.block_in;
  const int64_t begin = args.groups.starts[block], end = args.groups.starts[block + 1];
  if (begin == end)
    for (int64_t o = 0; o < outputs; ++o) copy_row<T>(nullptr, inputs, grad + o * grid.in);
  const int64_t limit = gathered_tokens(grid);
  for (int64_t first = begin; first < end; first += limit) {
    const int64_t tokens = smaller(limit, end - first);
    const int64_t x_stride = gathered_stride(tokens, PANEL);
    const Gathered<T> gathered{scratch + ceil_div(inputs, PANEL) * x_stride,
                               gathered_stride(tokens, GRAD_ROWS<T>),
                               scratch,
                               x_stride,
                               tokens,
                               outputs,
                               inputs};
    gather_tokens(gathered, args.grad_y.data + row * args.grad_y.block_stride, args.grad_y.stride,
                  args.x.data + col * args.x.block_stride, args.x.stride,
                  args.groups.entries + first);
    weight_grad_panels<tile_panels<T>(GRAD_ROWS<T>)>(gathered, 0, grad, grid.in, first > begin);
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
