// The gradients of x and of the gates, with the saving of the forward product.
//
// They share one product per open (token, block): acc = W_block^T grad_y, then grad_gate = x . acc
// and grad_x += gate * acc. Each value is written by one task, in a fixed order.
#pragma once

#include "isa/thin_input_grad.h"

namespace blockgate::BLOCKGATE_ISA {

inline int64_t padded_inputs(const Grid& grid) {
  const int64_t width = input_panel(packed_depth(grid));
  return ceil_div(packed_depth(grid), width) * width;
}

template <class T>
int64_t input_grad_scratch(const Grid& grid, int64_t cols, int64_t tokens) {
  return input_grad_block_size(grid) +
         (tokens < BUFFERED_TOKENS ? 0 : cols * tokens * padded_inputs(grid));
}

// Some tokens, over the panels of the block from `input` on, PANELS at once and then fewer; only
// a last single panel may be ragged.
template <int PANELS, int ROWS, class T>
BLOCKGATE_INLINE void input_grad_panels(const InputGradJob<T>& job, const Entry<T>* entries,
                                           const T* const (&rows)[ROWS], int64_t input,
                                           Vec<T> (&products)[ROWS]) {
  constexpr int64_t WIDTH = PANELS * PANEL;
  constexpr int L = LANES<T>;
  for (; PANELS == 1 ? input < job.inputs : input + WIDTH <= job.inputs; input += WIDTH) {
    Tile<T, ROWS, PANELS> tile;
    tile_multiply<1>(tile, rows, job.panels + input * job.outputs, job.outputs * PANEL, job.outputs);
    const int64_t width = smaller(WIDTH, job.inputs - input);
    if (job.grad_gates) {
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) {
        const T* x = job.x + entries[m].token * job.x_stride + input;
        T edge[WIDTH];
        if (width < WIDTH) {
          for (int64_t i = 0; i < WIDTH; ++i) edge[i] = i < width ? x[i] : T(0);
          x = edge;
        }
#pragma GCC unroll 16
        for (int v = 0; v < tile.WIDTH; ++v)
          products[m] = multiply_add(load(x + v * L), tile.acc[m][v], products[m]);
      }
    }
    if (job.grad_x) {
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) {
        T* grad_x = job.grad_x + entries[m].token * job.grad_x_stride + input;
        if (width == WIDTH) add_gated<T>(grad_x, grad_x, tile.acc[m], entries[m].gate, nullptr);
        else add_gated_edge<T>(grad_x, grad_x, tile.acc[m], entries[m].gate, nullptr, width);
      }
    }
  }
  if constexpr (PANELS > 1)
    input_grad_panels<PANELS / 2>(job, entries, rows, input, products);
}

// Some tokens, over all panels of the block.
template <int ROWS, class T>
BLOCKGATE_INLINE void input_grad_tile(const InputGradJob<T>& job, const Entry<T>* entries) {
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
  // Two panels at most: with more, sums and products no longer fit the registers side by side.
  input_grad_panels<smaller(2, tile_panels<T>(ROWS))>(job, entries, rows, 0, products);
  if (job.grad_gates) {
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
      job.grad_gates[entries[m].token * job.slots + entries[m].slot] =
          horizontal_sum<T>(products[m]);
  }
}

template <int WIDTH, int ROWS, class T>
__attribute__((noinline)) void input_grad_tiles(const InputGradJob<T>& job, int64_t first,
                                                int64_t tiles) {
  for (; tiles > 0; --tiles, first += ROWS) {
    if constexpr (WIDTH == PANEL) input_grad_tile<ROWS>(job, job.entries + first);
    else thin_input_grad_tile<WIDTH, ROWS>(job, job.entries + first);
  }
}

template <int WIDTH, class T>
void input_grad_rows(const InputGradJob<T>& job) {
  with_even_tiles<T>(job.count, [&](auto n, int64_t first, int64_t tiles) {
    input_grad_tiles<WIDTH, decltype(n)::value>(job, first, tiles);
  });
}

template <class T>
void input_grad_block(const InputGradJob<T>& job) {
  switch (input_panel(job.inputs)) {
    case 1: return input_grad_rows<1>(job);
    case 2: return input_grad_rows<2>(job);
    case 4: return input_grad_rows<4>(job);
    case 8: return input_grad_rows<8>(job);
    default: return input_grad_rows<PANEL>(job);
  }
}

template <class T>
void input_grad(const BackwardArgs<T>& args, const InputGradTask& task, T* scratch) {
  const Grid& grid = args.grid;
  const int64_t tokens = task.token_end - task.token_begin;
  const bool buffered = tokens >= BUFFERED_TOKENS;
  const int64_t stride = buffered ? padded_inputs(grid) : grid.in;
  // Where token 0 of a column of blocks has, or would have, its part of grad_x.
  const auto target = [&](int64_t col) -> T* {
    if (!args.grad_x) return nullptr;
    if (!buffered) return args.grad_x + col * grid.block_in;
    return scratch + input_grad_block_size(grid) +
           ((col - task.col_begin) * tokens - task.token_begin) * stride;
  };
  if (args.grad_x) {
    const int64_t begin = task.col_begin * grid.block_in;
    const int64_t width = smaller(task.col_end * grid.block_in, grid.in) - begin;
    if (buffered)
      copy_row<T>(nullptr, (task.col_end - task.col_begin) * tokens * stride,
                  scratch + input_grad_block_size(grid));
    else
      for (int64_t t = task.token_begin; t < task.token_end; ++t)
        copy_row<T>(nullptr, width, args.grad_x + t * grid.in + begin);
  }
  // Rows of blocks outermost: the columns of a task share what they read of grad_y.
  for (int64_t row = 0; row < grid.rows; ++row)
    for (int64_t col = task.col_begin; col < task.col_end; ++col) {
      const BlockUse<T> use =
          block_use(args.groups, row * grid.cols + col, task.token_begin, task.token_end);
      if (use.count == 0) continue;
      const int64_t outputs = outputs_of_row(grid, row), inputs = inputs_of_col(grid, col);
      copy_to_panels(args.weight + row * grid.block_out * grid.in + col * grid.block_in, grid.in,
                     outputs, inputs, scratch);
      input_grad_block<T>({args.grad_y.data + row * args.grad_y.block_stride, args.grad_y.stride,
                           scratch, outputs, inputs, args.x.data + col * args.x.block_stride,
                           args.x.stride, target(col), stride, args.grad_gates, args.slots,
                           use.entries, use.count});
    }
  if (!args.grad_x || !buffered) return;
  for (int64_t t = task.token_begin; t < task.token_end; ++t) {
    const T* from = target(task.col_begin) + t * stride;
    T* to = args.grad_x + t * grid.in + task.col_begin * grid.block_in;
    for (int64_t col = task.col_begin; col < task.col_end; ++col) {
      copy_row(from, inputs_of_col(grid, col), to);
      from += tokens * stride;
      to += grid.block_in;
    }
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
