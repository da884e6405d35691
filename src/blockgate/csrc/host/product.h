// How the products are cut into tasks and run: shared by the plain, the packed and the fused ops.
#pragma once

#include "host/buffer.h"
#include "host/dispatch.h"
#include "host/grouping.h"
#include "host/parallel.h"

#include <cstring>
#include <type_traits>
#include <utility>

namespace blockgate {

// Tasks per thread that even out rows of unequal work.
inline constexpr int64_t TASKS_PER_THREAD = 4;

// Tokens in one task at most: bounds the memory a task sums its results in.
inline int64_t token_limit(int64_t block) {
  constexpr int64_t BUFFER_ELEMENTS = 262144;
  return larger(64, BUFFER_ELEMENTS / block);
}

// Owns the copy if there is one.
template <class T>
struct BlockRowsCopy {
  BlockRows<T> view;
  Buffer<T> copy;
};

// The columns of a row-major matrix in blocks; see BlockRows on why large batches are copied.
template <class T>
BlockRowsCopy<T> block_rows(const T* data, int64_t stride, int64_t tokens, int64_t width,
                            int64_t block) {
  constexpr int64_t COPIED_TOKENS = 32;
  if (tokens < COPIED_TOKENS || block >= width) return {{data, block, stride}, Buffer<T>()};
  const int64_t blocks = ceil_div(width, block);
  // The blocks begin at odd distances, for the same reason.
  const int64_t block_stride = tokens * block + 16;
  Buffer<T> copy(blocks * block_stride);
  // A few tokens at a time, so that both sides move along whole runs of memory.
  constexpr int64_t RUN = 8;
  run_tasks(ceil_div(tokens, RUN), threads_for(tokens * width), [&](int64_t run) {
    const int64_t begin = run * RUN, end = smaller(begin + RUN, tokens);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t size = smaller(block, width - b * block);
      const T* from = data + b * block;
      T* to = copy.get() + b * block_stride;
      const auto copy = [&](auto length) __attribute__((always_inline)) {
        for (int64_t t = begin; t < end; ++t)
          std::memcpy(to + t * block, from + t * stride, length * sizeof(T));
      };
      // A length known to the compiler spares the smallest common blocks a call per row.
      switch (size) {
        case 1: copy(std::integral_constant<int64_t, 1>()); break;
        case 2: copy(std::integral_constant<int64_t, 2>()); break;
        case 4: copy(std::integral_constant<int64_t, 4>()); break;
        case 8: copy(std::integral_constant<int64_t, 8>()); break;
        case 16: copy(std::integral_constant<int64_t, 16>()); break;
        default: copy(size);
      }
    }
  });
  return {{copy.get(), block_stride, block}, std::move(copy)};
}

// y for all tokens. `open` is the number of open (token, block) pairs: the work.
template <class T>
void run_forward(const ForwardArgs<T>& args, int64_t tokens, int64_t open) {
  const Grid& grid = args.grid;
  const int64_t panels = packed_panels(grid);
  const int64_t work = open * smaller(grid.block_out, grid.out) * packed_depth(grid) / 8 +
                       tokens * grid.out / 4;
  const int64_t threads = threads_for(work);
  const int64_t wanted = threads == 1 ? 1 : threads * TASKS_PER_THREAD;
  // First by rows of blocks, several at once if they are low, so that y is written in longer
  // runs; then by panels, and only then by tokens, which repeats the work per block. None of the
  // cuts changes a bit of the result.
  constexpr int64_t RUN_OF_OUTPUTS = 64;
  const int64_t rows_per_task =
      larger(1, smaller(RUN_OF_OUTPUTS / grid.block_out, grid.rows / wanted));
  const int64_t row_parts = ceil_div(grid.rows, rows_per_task);
  const int64_t panel_parts = smaller(panels, ceil_div(wanted, row_parts));
  const int64_t buffered = grid.cols > 1 ? rows_per_task * panels * PANEL : 1;
  const int64_t token_parts = larger(smaller(tokens, ceil_div(wanted, row_parts * panel_parts)),
                                     ceil_div(tokens, token_limit(buffered)));
  const auto& kernel = typed_kernels<T>();
  const int64_t scratch =
      kernel.forward_scratch(grid, rows_per_task, ceil_div(tokens, token_parts));
  run_tasks(row_parts * panel_parts * token_parts, threads, [&](int64_t i) {
    const int64_t row = i / (panel_parts * token_parts) * rows_per_task;
    const int64_t panel = i / token_parts % panel_parts, token = i % token_parts;
    const ForwardTask task{row,
                           smaller(row + rows_per_task, grid.rows),
                           panels * panel / panel_parts,
                           panels * (panel + 1) / panel_parts,
                           tokens * token / token_parts,
                           tokens * (token + 1) / token_parts};
    // Panels that a ragged last row doesn't have are nobody's work.
    if (task.panel_begin * PANEL < outputs_of_row(grid, row))
      kernel.forward(args, task, Buffer<T>(scratch).get());
  });
}

// Columns of blocks in one task of a gradient: several if they are thin, so that they share what
// is read of grad_y and are written in longer runs; fewer if `wanted` tasks would not come together.
inline int64_t cols_per_task(const Grid& grid, int64_t tasks_of_a_col, int64_t wanted) {
  constexpr int64_t RUN_OF_INPUTS = 64;
  if (grid.block_in > PANEL) return 1;
  return larger(1, smaller(RUN_OF_INPUTS / grid.block_in, grid.cols * tasks_of_a_col / wanted));
}

// grad_x and grad_gates.
template <class T>
void run_input_grad(const BackwardArgs<T>& args, int64_t tokens, int64_t open) {
  const Grid& grid = args.grid;
  const int64_t threads = threads_for(open * grid.block_out * packed_depth(grid) / 8);
  const int64_t wanted = threads == 1 ? 1 : threads * TASKS_PER_THREAD;
  const int64_t cols = cols_per_task(grid, 1, wanted), col_parts = ceil_div(grid.cols, cols);
  const int64_t token_parts = larger(smaller(tokens, ceil_div(wanted, col_parts)),
                                     ceil_div(tokens, token_limit(cols * packed_depth(grid))));
  const auto& kernel = typed_kernels<T>();
  const int64_t scratch = kernel.input_grad_scratch(grid, cols, ceil_div(tokens, token_parts));
  run_tasks(col_parts * token_parts, threads, [&](int64_t i) {
    const int64_t col = i / token_parts * cols, token = i % token_parts;
    kernel.input_grad(args,
                      {col, smaller(col + cols, grid.cols), tokens * token / token_parts,
                       tokens * (token + 1) / token_parts},
                      Buffer<T>(scratch).get());
  });
}

template <class T>
void run_weight_grad(const BackwardArgs<T>& args, int64_t open) {
  const Grid& grid = args.grid;
  const int64_t work = open * smaller(grid.block_out, grid.out) * packed_depth(grid) / 8 +
                       grid.out * grid.in / 8;
  const int64_t threads = threads_for(work);
  const int64_t cols = cols_per_task(grid, grid.rows, threads * TASKS_PER_THREAD);
  const int64_t col_parts = ceil_div(grid.cols, cols);
  const auto& kernel = typed_kernels<T>();
  const int64_t scratch = kernel.weight_grad_scratch(grid, cols);
  run_tasks(grid.rows * col_parts, threads, [&](int64_t i) {
    const int64_t col = i % col_parts * cols;
    kernel.weight_grad(args, {i / col_parts, col, smaller(col + cols, grid.cols)},
                       Buffer<T>(scratch).get());
  });
}

}  // namespace blockgate
