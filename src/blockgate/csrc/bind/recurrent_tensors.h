// Checks and weights that both passes of gated_lstm and gated_gru share.
#pragma once

#include "bind/groups.h"
#include "host/product.h"
#include "host/tensors.h"

namespace blockgate __attribute__((visibility("hidden"))) {

struct RecurrentShape {
  Cell cell;
  int64_t steps, rows, size;
  Grid grid;  // of the recurrent weight (gates * size, size)
};

// h0 (rows, size) and the weight decide; everything else is checked against them.
inline RecurrentShape recurrent_shape(Cell cell, int64_t steps, const Tensor& h0,
                                      const Tensor& weight, const Integers& block) {
  STD_TORCH_CHECK(h0.dim() == 2, "h0: expected 2 dimensions, got shape ", shape_text(h0));
  const int64_t rows = h0.size(0), size = h0.size(1), out = cell_gates(cell) * size;
  STD_TORCH_CHECK(steps >= 1 && rows >= 1 && size >= 1,
                  cell == Cell::lstm ? "gated_lstm" : "gated_gru",
                  ": expected at least one step, row and hidden unit, got ", steps, ", ", rows,
                  " and ", size);
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) == out && weight.size(1) == size,
                  "weight: expected shape (", out, ", ", size, "), got ", shape_text(weight));
  const BlockSize blocks = block_of(block);
  return {cell, steps, rows, size, make_grid(out, size, blocks.out, blocks.in)};
}

inline void check_steps(const Tensor& t, const char* name, const RecurrentShape& shape, int64_t width) {
  check_size(t, name, 0, shape.steps);
  check_size(t, name, 1, shape.rows);
  check_size(t, name, 2, width);
}

template <class T>
Dense<T> state_of(const Tensor& t, const char* name, const RecurrentShape& shape) {
  Dense<T> view = dense_of<T>(t, name, 2);
  check_size(t, name, 0, shape.rows);
  check_size(t, name, 1, shape.size);
  return view;
}

template <class T>
Dense<T> steps_of(const Tensor& t, const char* name, const RecurrentShape& shape, int64_t width) {
  Dense<T> view = dense_of<T>(t, name, 3);
  check_steps(t, name, shape, width);
  return view;
}

// Sizes of the block gate; `scored` is what its last layer reads: the hidden layer or the key.
struct GateShape {
  int64_t scores, scored;
  Key key;
};

template <class T>
GateShape gate_shape(const RecurrentShape& shape, const Tensor& gate_weight,
                     const std::optional<Tensor>& hidden_weight, const Integers& key) {
  check_tensor(gate_weight, "gate_weight", SCALAR_TYPE<T>, 2);
  GateShape gate{shape.grid.rows * shape.grid.cols, 0, key_of(key, shape.size, "hidden units")};
  gate.scored = gate.key.size;
  if (hidden_weight) {
    check_tensor(*hidden_weight, "hidden_weight", SCALAR_TYPE<T>, 2);
    check_size(*hidden_weight, "hidden_weight", 1, gate.key.size);
    gate.scored = hidden_weight->size(0);
  }
  check_size(gate_weight, "gate_weight", 0, gate.scores);
  check_size(gate_weight, "gate_weight", 1, gate.scored);
  return gate;
}

// Threads worth using for one step of `kept` open blocks a row.
inline int64_t step_threads(const RecurrentShape& shape, const GateShape& gate, int64_t kept) {
  const int64_t block = smaller(shape.grid.block_out, shape.grid.out) * packed_depth(shape.grid);
  return threads_for(shape.rows * (kept * block + gate.scores * gate.scored + 64 * shape.size));
}

// All blocks of a weight as forward products read them: see packed_block_size.
template <class T>
Buffer<T> pack_forward(const Grid& grid, const T* weight) {
  Buffer<T> packed(grid.rows * grid.cols * packed_block_size(grid));
  const int64_t panel_size = packed_depth(grid) * PANEL;
  run_tasks(grid.rows * grid.cols, threads_for(grid.out * grid.in), [&](int64_t block) {
    const int64_t row = block / grid.cols, col = block % grid.cols;
    const int64_t outputs = outputs_of_row(grid, row);
    const T* from = weight + row * grid.block_out * grid.in + col * grid.block_in;
    T* to = packed.get() + block * packed_block_size(grid);
    for (int64_t o = 0; o < outputs; o += PANEL, to += panel_size)
      typed_kernels<T>().transpose_to_panels(from + o * grid.in, grid.in,
                                             smaller(PANEL, outputs - o), inputs_of_col(grid, col),
                                             to);
  });
  return packed;
}

// All blocks as the gradient of x reads them: see input_grad_block_size.
template <class T>
Buffer<T> pack_input_grad(const Grid& grid, const T* weight) {
  Buffer<T> packed(grid.rows * grid.cols * input_grad_block_size(grid));
  run_tasks(grid.rows * grid.cols, threads_for(grid.out * grid.in), [&](int64_t block) {
    const int64_t row = block / grid.cols, col = block % grid.cols;
    typed_kernels<T>().copy_to_panels(weight + row * grid.block_out * grid.in + col * grid.block_in,
                                      grid.in, outputs_of_row(grid, row), inputs_of_col(grid, col),
                                      packed.get() + block * input_grad_block_size(grid));
  });
  return packed;
}

}  // namespace blockgate
