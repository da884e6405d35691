// Products of one step of a recurrence: few tokens, many calls, weights packed beforehand.
//
// The same blocks, tiles and order of sums as in forward.h and stream.h, so the same bits; only the
// grouping of tokens by block differs. The task that owns a row of blocks does it for that row.
#pragma once

#include "isa/input_grad.h"
#include "isa/stream.h"

namespace blockgate::BLOCKGATE_ISA {

template <class T>
int64_t step_product_scratch(const Grid& grid, int64_t tokens) {
  return grid.cols * tokens * int64_t(sizeof(Entry<T>)) + grid.cols * int64_t(sizeof(int64_t)) +
         weight_scratch(grid) * int64_t(sizeof(T)) + 64;
}

// The tokens that opened each block of one row: block `col` owns counts[col] entries from
// entries + col * tokens on.
template <class T>
void group_row(const StepProduct<T>& args, int64_t row, Entry<T>* entries, int64_t* counts) {
  const Grid& grid = args.grid;
  for (int64_t col = 0; col < grid.cols; ++col) counts[col] = 0;
  for (int64_t t = 0; t < args.tokens; ++t) {
    const int32_t* starts = args.row_starts + t * (grid.rows + 1) + row;
    const T* gates = args.gates + t * args.slots;
    const int64_t* indices = args.indices + t * args.slots;
    for (int32_t s = starts[0]; s < starts[1]; ++s) {
      if (gates[s] == T(0)) continue;
      const int64_t col = indices[s] - row * grid.cols;
      entries[col * args.tokens + counts[col]++] = {int32_t(t), s, gates[s]};
    }
  }
}

template <class W, class T>
void step_row(const StepProduct<T>& args, int64_t row, int64_t panel_begin, int64_t panel_end,
              const Entry<T>* entries, const int64_t* counts, T* converted) {
  const Grid& grid = args.grid;
  const int64_t stride = panel_elements<W>(packed_depth(grid));
  T* y = args.y + row * grid.block_out + panel_begin * PANEL;
  BlockRows<typename Arithmetic<T, W>::Input> x;
  if constexpr (Arithmetic<T, W>::IN_PAIRS) x = args.quantised.steps;
  else x = {args.x, grid.block_in, args.x_stride};
  for (int64_t col = 0; col < grid.cols; ++col) {
    const int64_t block = row * grid.cols + col, count = entries ? counts[col] : args.tokens;
    if (count == 0) continue;
    const BlockJob<T, W> job{
        x.data + col * x.block_stride,
        x.stride,
        static_cast<const W*>(args.packed.blocks) + block * block_elements<W>(grid) +
            panel_begin * stride,
        stride,
        inputs_of_col(grid, col),
        args.packed.scale ? args.packed.scale + block * block_scales<W>(grid) + panel_begin * PANEL
                          : nullptr,
        {y, grid.out, y, grid.out},
        outputs_of_row(grid, row) - panel_begin * PANEL,
        entries ? entries + col * args.tokens : nullptr,
        0,
        count,
        args.quantised.size + col * args.quantised.tokens};
    forward_packed<T, W>(grid, job, panel_end - panel_begin, converted);
  }
}

// The only token: its open blocks stream by.
inline void step_stream(const StepProduct<float>& args, int64_t row, int64_t panel_begin,
                        int64_t panel_end, OpenBlock* open) {
  const Grid& grid = args.grid;
  int64_t count = 0;
  if (args.gates) {
    for (int32_t s = args.row_starts[row]; s < args.row_starts[row + 1]; ++s)
      if (args.gates[s] != 0)
        open[count++] = {int32_t(row), int32_t(args.indices[s] - row * grid.cols), args.gates[s]};
  } else {
    for (; count < grid.cols; ++count) open[count] = {int32_t(row), int32_t(count), 1};
  }
  // What y holds takes the place of the bias.
  stream({grid, args.x, args.packed, args.y, args.y, args.then, args.begun, args.quantised},
         row, panel_begin, panel_end, open, count);
}

template <class T>
void step_product(const StepProduct<T>& args, int64_t row, int64_t panel_begin, int64_t panel_end,
                  std::byte* scratch) {
  const Grid& grid = args.grid;
  panel_end = smaller(panel_end, ceil_div(outputs_of_row(grid, row), PANEL));
  if (panel_begin >= panel_end) return;
  T* converted = reinterpret_cast<T*>(scratch);
  auto* counts = reinterpret_cast<int64_t*>(converted + weight_scratch(grid));
  auto* entries = reinterpret_cast<Entry<T>*>(counts + grid.cols);
  if constexpr (sizeof(T) == sizeof(float)) {
    if (args.tokens == 1)
      return step_stream(args, row, panel_begin, panel_end, reinterpret_cast<OpenBlock*>(entries));
  }
  if (args.gates) group_row(args, row, entries, counts);
  else entries = nullptr;
  visit_format<T>(args.packed.format, [&](auto stored) {
    step_row<typename decltype(stored)::type>(args, row, panel_begin, panel_end, entries, counts,
                                              converted);
  });
}

template <class T>
void step_input_grad(const StepInputGrad<T>& args, int64_t col) {
  const Grid& grid = args.grid;
  const int64_t input = col * grid.block_in, inputs = inputs_of_col(grid, col);
  // Entries name tokens of the whole sequence, the results are those of this step.
  T* grad_x = args.grad_x + input - args.token_begin * grid.in;
  T* grad_gates = args.grad_gates - args.token_begin * args.slots;
  for (int64_t t = args.token_begin; t < args.token_end; ++t)
    copy_row<T>(nullptr, inputs, grad_x + t * grid.in);
  for (int64_t row = 0; row < grid.rows; ++row) {
    const int64_t block = row * grid.cols + col;
    const int64_t count = args.ends[block] - args.begins[block];
    if (count == 0) continue;
    input_grad_block<T>({args.grad_y + row * grid.block_out, grid.out,
                         args.weight + block * input_grad_block_size(grid),
                         outputs_of_row(grid, row), inputs, args.x + input, grid.in, grad_x,
                         grid.in, grad_gates, args.slots, args.entries + args.begins[block],
                         count});
  }
}

template <int VECTORS, class T>
BLOCKGATE_INLINE void add_rows_part(const T* weight, int64_t width, const T* values,
                                    const int64_t* indices, int64_t count, T* y) {
  constexpr int L = LANES<T>;
  Vec<T> acc[VECTORS];
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; ++v) acc[v] = load(y + v * L);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = indices ? indices[i] : i;
    const Vec<T> value = broadcast(values[index]);
    const T* row = weight + index * width;
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) acc[v] = multiply_add(value, load(row + v * L), acc[v]);
  }
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; ++v) store(y + v * L, acc[v]);
}

template <class T>
void add_rows(const T* weight, int64_t width, const T* values, const int64_t* indices,
              int64_t count, T* y) {
  constexpr int L = LANES<T>;
  int64_t i = 0;
  for (; i + 8 * L <= width; i += 8 * L)
    add_rows_part<8>(weight + i, width, values, indices, count, y + i);
  for (; i + L <= width; i += L)
    add_rows_part<1>(weight + i, width, values, indices, count, y + i);
  for (; i < width; ++i)
    for (int64_t k = 0; k < count; ++k) {
      const int64_t index = indices ? indices[k] : k;
      y[i] = multiply_add(values[index], weight[index * width + i], y[i]);
    }
}

}  // namespace blockgate::BLOCKGATE_ISA
