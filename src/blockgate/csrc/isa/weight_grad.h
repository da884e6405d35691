// The gradient of the weight: one small product per block over the tokens that opened it.
//
// Each block is written by one task, its tokens in ascending order.
#pragma once

#include "isa/thin_weight_grad.h"

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
int64_t weight_grad_scratch(const Grid& grid, int64_t cols) {
  const int64_t outputs = smaller(grid.block_out, grid.out), tokens = gathered_tokens(grid);
  return thin_weight_grad_scratch(grid, cols) +
         ceil_div(packed_depth(grid), PANEL) * gathered_stride(tokens, PANEL) +
         ceil_div(outputs, GRAD_ROWS<T>) * gathered_stride(tokens, GRAD_ROWS<T>);
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
    // The rest of the last group is 0: its results are never stored, but what memory happens to
    // hold can be numbers so small that computing with them takes a hundred times as long.
    for (int64_t i = outputs - o; i > 0 && i < ROWS; ++i) to_y[i] = T(0);
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

// A block that is one panel wide: its tokens' rows are so short that they are read where they are,
// once for each tile of outputs, at less cost than gathering them.
template <int ROWS, class T>
BLOCKGATE_INLINE void short_rows_tile(const BackwardArgs<T>& args, const T* grad_y, const T* x,
                                      const Entry<T>* entries, int64_t tokens, T* grad,
                                      bool accumulate) {
  constexpr int VECTORS = PANEL_VECTORS<T>, L = LANES<T>;
  Tile<T, ROWS, 1> tile;
  tile_clear(tile);
  for (int64_t t = 0; t < tokens; ++t) {
    const T* from_x = x + entries[t].token * args.x.stride;
    const T* from_y = grad_y + entries[t].token * args.grad_y.stride;
    Vec<T> gated[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) gated[v] = broadcast(entries[t].gate) * load(from_x + v * L);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v)
        tile.acc[m][v] = multiply_add(broadcast(from_y[m]), gated[v], tile.acc[m][v]);
  }
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      T* target = grad + m * args.grid.in + v * L;
      store(target, accumulate ? load(target) + tile.acc[m][v] : tile.acc[m][v]);
    }
}

template <class T>
void short_rows_weight_grad(const BackwardArgs<T>& args, int64_t row, int64_t col, int64_t begin,
                            int64_t end, T* grad) {
  // Rows that stay in the first-level cache from one tile of outputs to the next.
  constexpr int64_t RESIDENT_TOKENS = 128;
  const T* grad_y = args.grad_y.data + row * args.grad_y.block_stride;
  const T* x = args.x.data + col * args.x.block_stride;
  for (int64_t first = begin; first < end; first += RESIDENT_TOKENS) {
    const int64_t tokens = smaller(RESIDENT_TOKENS, end - first);
    const auto tile = [&](auto n, int64_t output) {
      short_rows_tile<decltype(n)::value>(args, grad_y + output, x, args.groups.entries + first,
                                          tokens, grad + output * args.grid.in, first > begin);
    };
    int64_t output = 0;
    // Where registers hold so many: fewer times through the tokens.
    if constexpr (PANEL * PANEL_VECTORS<T> <= BLOCKGATE_ACCUMULATORS)
      for (; output + PANEL <= outputs_of_row(args.grid, row); output += PANEL)
        tile(RowCount<PANEL>(), output);
    if (output == outputs_of_row(args.grid, row)) continue;
    with_even_tiles<T>(outputs_of_row(args.grid, row) - output,
                       [&](auto n, int64_t at, int64_t tiles) {
                         for (at += output; tiles > 0; --tiles, at += decltype(n)::value) tile(n, at);
                       });
  }
}

// The outputs of a block from `first_output` on.
template <class T>
void block_weight_grad(const BackwardArgs<T>& args, int64_t row, int64_t col, int64_t first_output,
                       T* scratch) {
  const Grid& grid = args.grid;
  const int64_t block = row * grid.cols + col;
  const int64_t outputs = outputs_of_row(grid, row) - first_output;
  const int64_t inputs = inputs_of_col(grid, col);
  T* grad =
      args.grad_weight + (row * grid.block_out + first_output) * grid.in + col * grid.block_in;
  const int64_t begin = args.groups.starts[block], end = args.groups.starts[block + 1];
  if (begin == end)
    for (int64_t o = 0; o < outputs; ++o) copy_row<T>(nullptr, inputs, grad + o * grid.in);
  if (inputs == PANEL && first_output == 0 && outputs <= 4 * PANEL)
    return short_rows_weight_grad(args, row, col, begin, end, grad);
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
    gather_tokens(gathered, args.grad_y.data + row * args.grad_y.block_stride + first_output,
                  args.grad_y.stride, args.x.data + col * args.x.block_stride, args.x.stride,
                  args.groups.entries + first);
    weight_grad_panels<tile_panels<T>(GRAD_ROWS<T>)>(gathered, 0, grad, grid.in, first > begin);
  }
}

template <class T>
void weight_grad(const BackwardArgs<T>& args, const WeightGradTask& task, T* scratch) {
  const int64_t thin = thin_outputs(args.grid, task.row);
  if (thin) thin_weight_grad(args, task, thin, scratch);
  if (thin == outputs_of_row(args.grid, task.row)) return;
  for (int64_t col = task.col_begin; col < task.col_end; ++col)
    block_weight_grad(args, task.row, col, thin, scratch);
}

}  // namespace blockgate::BLOCKGATE_ISA
