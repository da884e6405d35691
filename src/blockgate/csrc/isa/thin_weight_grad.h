// The gradient of the weight for blocks of few inputs and more outputs.
//
// The vectors run along the outputs, read where they are: the transpose of grad_weight, which is
// turned for several blocks at once.
#pragma once

#include "isa/forward.h"

namespace blockgate::BLOCKGATE_ISA {

// Tokens whose inputs are gathered at once; their rows of grad_y stay in the cache between tiles.
inline constexpr int64_t THIN_TOKENS = 128;

// How many outputs of each block in a row of blocks are computed here: whole panels, or none.
inline int64_t thin_outputs(const Grid& grid, int64_t row) {
  const int64_t depth = packed_depth(grid), outputs = outputs_of_row(grid, row);
  const bool thin = depth < PANEL || (depth == PANEL && grid.block_out > 4 * PANEL);
  return thin ? outputs / PANEL * PANEL : 0;
}

inline int64_t thin_weight_grad_scratch(const Grid& grid, int64_t cols) {
  const int64_t outputs = thin_outputs(grid, 0);
  return outputs ? THIN_TOKENS * PANEL + cols * packed_depth(grid) * outputs : 0;
}

// One block: x are its gathered inputs (tokens, inputs), sums its transposed gradient.
template <class T>
struct ThinJob {
  const T* x;
  int64_t inputs;
  const T* grad_y;
  int64_t grad_y_stride;
  const Entry<T>* entries;
  int64_t tokens;
  T* sums;
  int64_t outputs;
  bool accumulate;
};

template <int ROWS, int PANELS, class T>
BLOCKGATE_INLINE void thin_weight_grad_tile(const ThinJob<T>& job, int64_t input, int64_t output) {
  constexpr int L = LANES<T>, WIDTH = Tile<T, ROWS, PANELS>::WIDTH;
  Tile<T, ROWS, PANELS> tile;
  tile_clear(tile);
  const T* x = job.x + input;
  const T* grad_y = job.grad_y + output;
  for (int64_t t = 0; t < job.tokens; ++t, x += job.inputs) {
    const T* from = grad_y + job.entries[t].token * job.grad_y_stride;
    Vec<T> grad[WIDTH];
#pragma GCC unroll 16
    for (int j = 0; j < WIDTH; ++j) grad[j] = load(from + j * L);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const Vec<T> value = broadcast(x[m]);
#pragma GCC unroll 16
      for (int j = 0; j < WIDTH; ++j)
        tile.acc[m][j] = multiply_add(value, grad[j], tile.acc[m][j]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 16
    for (int j = 0; j < WIDTH; ++j) {
      T* target = job.sums + (input + m) * job.outputs + output + j * L;
      store(target, job.accumulate ? load(target) + tile.acc[m][j] : tile.acc[m][j]);
    }
}

template <int ROWS, int PANELS, class T>
BLOCKGATE_INLINE void thin_weight_grad_panels(const ThinJob<T>& job, int64_t input,
                                              int64_t output) {
  for (; output + PANELS * PANEL <= job.outputs; output += PANELS * PANEL)
    thin_weight_grad_tile<ROWS, PANELS>(job, input, output);
  if constexpr (PANELS > 1) thin_weight_grad_panels<ROWS, PANELS / 2>(job, input, output);
}

// gate * x for some tokens, side by side.
template <class T>
void gather_inputs(const T* x, int64_t x_stride, int64_t inputs, const Entry<T>* entries,
                   int64_t tokens, T* gathered) {
  for (int64_t t = 0; t < tokens; ++t, gathered += inputs) {
    const T* from = x + entries[t].token * x_stride;
    const T gate = entries[t].gate;
    int64_t i = 0;
    for (; i + 4 <= inputs; i += 4) {
      Part<T, 4> values;
      __builtin_memcpy(&values, from + i, sizeof values);
      values *= gate;
      __builtin_memcpy(gathered + i, &values, sizeof values);
    }
    for (; i < inputs; ++i) gathered[i] = gate * from[i];
  }
}

// The first `outputs` outputs of the task's blocks.
template <class T>
void thin_weight_grad(const BackwardArgs<T>& args, const WeightGradTask& task, int64_t outputs,
                      T* scratch) {
  const Grid& grid = args.grid;
  T* const sums = scratch + THIN_TOKENS * PANEL;
  const T* grad_y = args.grad_y.data + task.row * args.grad_y.block_stride;
  T* sum = sums;
  for (int64_t col = task.col_begin; col < task.col_end; ++col) {
    const int64_t inputs = inputs_of_col(grid, col), block = task.row * grid.cols + col;
    const int64_t begin = args.groups.starts[block], end = args.groups.starts[block + 1];
    if (begin == end) copy_row<T>(nullptr, inputs * outputs, sum);
    for (int64_t first = begin; first < end; first += THIN_TOKENS) {
      const int64_t tokens = smaller(THIN_TOKENS, end - first);
      const Entry<T>* entries = args.groups.entries + first;
      gather_inputs(args.x.data + col * args.x.block_stride, args.x.stride, inputs, entries, tokens,
                    scratch);
      const ThinJob<T> job{scratch, inputs, grad_y,  args.grad_y.stride, entries,
                           tokens,  sum,    outputs, first > begin};
      with_even_tiles<T>(inputs, [&](auto n, int64_t input, int64_t tiles) {
        constexpr int ROWS = decltype(n)::value;
        for (; tiles > 0; --tiles, input += ROWS)
          thin_weight_grad_panels<ROWS, tile_panels<T>(ROWS)>(job, input, 0);
      });
    }
    sum += inputs * outputs;
  }
  transpose_matrix(sums, outputs, (sum - sums) / outputs, outputs,
                   args.grad_weight + task.row * grid.block_out * grid.in +
                       task.col_begin * grid.block_in,
                   grid.in);
}

}  // namespace blockgate::BLOCKGATE_ISA
