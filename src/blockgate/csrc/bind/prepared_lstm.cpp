// run_prepared_lstm: a stack of LSTM layers on prepared packed layers, for inference.
#include "bind/groups.h"
#include "host/lstm_stack.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>

namespace blockgate {
namespace {

// The layers named by `handles`: input and recurrent product of each layer of the stack.
LstmStack find_stack(const Integers& handles, Integers open_blocks, const StackShape& shape,
                     int64_t inputs) {
  LstmStack found{{}, std::move(open_blocks)};
  for (int64_t i = 0; i < int64_t(handles.size()); ++i) {
    found.products.push_back(find_prepared(handles[i]));
    const Grid& grid = found.products.back()->grid;
    const int64_t in = i == 0 ? inputs : shape.size;
    STD_TORCH_CHECK(grid.out == 4 * shape.size && grid.in == in, "handles: expected ", in, " -> ",
                    4 * shape.size, " features at position ", i, ", got ", grid.in, " -> ",
                    grid.out);
  }
  return found;
}

std::tuple<Tensor, Tensor, Tensor> run_prepared_lstm(const Tensor& x, const Tensor& h,
                                                     const Tensor& c, Integers handles,
                                                     Integers open_blocks) {
  const Dense<float> input = dense_of<float>(x, "x", 3);
  const Dense<float> first_h = dense_of<float>(h, "h", 3), first_c = dense_of<float>(c, "c", 3);
  const StackShape shape{x.size(0), x.size(1), h.size(2), h.size(0)};
  STD_TORCH_CHECK(shape.layers >= 1 && shape.size >= 1,
                  "h: expected at least one layer and hidden unit, got shape ", shape_text(h));
  check_size(h, "h", 1, shape.rows);
  check_size(c, "c", 0, shape.layers);
  check_size(c, "c", 1, shape.rows);
  check_size(c, "c", 2, shape.size);
  const auto check_count = [&](const char* name, const Integers& list) {
    STD_TORCH_CHECK(int64_t(list.size()) == 2 * shape.layers, name, ": expected ", 2 * shape.layers,
                    " numbers, two for each of the ", shape.layers, " layers, got ", list.size());
  };
  check_count("handles", handles);
  check_count("open_blocks", open_blocks);
  const LstmStack stack = find_stack(handles, std::move(open_blocks), shape, x.size(2));

  const Tensor y = empty_tensor({shape.steps, shape.rows, shape.size}, ScalarType::Float);
  const Tensor h_n = empty_tensor({shape.layers, shape.rows, shape.size}, ScalarType::Float);
  const Tensor c_n = empty_tensor({shape.layers, shape.rows, shape.size}, ScalarType::Float);
  const States states{first_h.data, first_c.data, data_of<float>(h_n), data_of<float>(c_n)};
  const int64_t state = shape.rows * shape.size;
  if (shape.steps * shape.rows == 0) {
    const int64_t bytes = shape.layers * state * int64_t(sizeof(float));
    if (bytes > 0) std::memcpy(states.h_n, states.h, bytes);
    if (bytes > 0) std::memcpy(states.c_n, states.c, bytes);
  } else if (shape.steps == 1) {
    run_single_step(stack, shape, input.data, states);
    std::memcpy(data_of<float>(y), states.h_n + (shape.layers - 1) * state, state * sizeof(float));
  } else {
    run_sequence(stack, shape, input.data, states, data_of<float>(y));
  }
  return {y, h_n, c_n};
}

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("run_prepared_lstm", TORCH_BOX(&blockgate::run_prepared_lstm));
}
