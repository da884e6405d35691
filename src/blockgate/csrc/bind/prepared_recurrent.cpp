// run_prepared_lstm and run_prepared_gru: stacks of layers on prepared packed layers, for inference.
#include "bind/groups.h"
#include "host/recurrent_stack.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <optional>
#include <tuple>

namespace blockgate {
namespace {

// The layers named by `handles`: input and recurrent product of each layer of the stack.
RecurrentStack find_stack(const Integers& handles, Integers open_blocks, const StackShape& shape,
                          int64_t inputs) {
  RecurrentStack found{{}, std::move(open_blocks)};
  const int64_t out = shape.gates() * shape.size;
  for (int64_t i = 0; i < int64_t(handles.size()); ++i) {
    found.products.push_back(find_prepared(handles[i]));
    const Grid& grid = found.products.back()->grid;
    const int64_t in = i == 0 ? inputs : shape.size;
    STD_TORCH_CHECK(grid.out == out && grid.in == in, "handles: expected ", in, " -> ", out,
                    " features at position ", i, ", got ", grid.in, " -> ", grid.out);
  }
  return found;
}

struct StackResult {
  Tensor y, h_n;
  std::optional<Tensor> c_n;
};

// `c` is there for an LSTM only.
StackResult run_stack(Cell cell, const Tensor& x, const Tensor& h, const Tensor* c,
                      const Integers& handles, Integers open_blocks) {
  const Dense<float> input = dense_of<float>(x, "x", 3), first_h = dense_of<float>(h, "h", 3);
  const std::optional<Dense<float>> first_c =
      c ? std::optional(dense_of<float>(*c, "c", 3)) : std::nullopt;
  const StackShape shape{cell, x.size(0), x.size(1), h.size(2), h.size(0)};
  STD_TORCH_CHECK(shape.layers >= 1 && shape.size >= 1,
                  "h: expected at least one layer and hidden unit, got shape ", shape_text(h));
  check_size(h, "h", 1, shape.rows);
  if (c) {
    check_size(*c, "c", 0, shape.layers);
    check_size(*c, "c", 1, shape.rows);
    check_size(*c, "c", 2, shape.size);
  }
  const auto check_count = [&](const char* name, const Integers& list) {
    STD_TORCH_CHECK(int64_t(list.size()) == 2 * shape.layers, name, ": expected ", 2 * shape.layers,
                    " numbers, two for each of the ", shape.layers, " layers, got ", list.size());
  };
  check_count("handles", handles);
  check_count("open_blocks", open_blocks);
  const RecurrentStack stack = find_stack(handles, std::move(open_blocks), shape, x.size(2));

  const auto states_of = [&] {
    return empty_tensor({shape.layers, shape.rows, shape.size}, ScalarType::Float);
  };
  StackResult result{empty_tensor({shape.steps, shape.rows, shape.size}, ScalarType::Float),
                     states_of(), std::nullopt};
  if (c) result.c_n = states_of();
  float* y = data_of<float>(result.y);
  const States states{first_h.data, first_c ? first_c->data : nullptr, data_of<float>(result.h_n),
                      c ? data_of<float>(*result.c_n) : nullptr};
  const int64_t state = shape.rows * shape.size;
  if (shape.steps * shape.rows == 0) {
    const int64_t bytes = shape.layers * state * int64_t(sizeof(float));
    if (bytes > 0) std::memcpy(states.h_n, states.h, bytes);
    if (bytes > 0 && c) std::memcpy(states.c_n, states.c, bytes);
  } else if (shape.steps == 1) {
    run_single_step(stack, shape, input.data, states);
    std::memcpy(y, states.h_n + (shape.layers - 1) * state, state * sizeof(float));
  } else {
    run_sequence(stack, shape, input.data, states, y);
  }
  return result;
}

std::tuple<Tensor, Tensor, Tensor> run_prepared_lstm(const Tensor& x, const Tensor& h,
                                                     const Tensor& c, Integers handles,
                                                     Integers open_blocks) {
  StackResult result = run_stack(Cell::lstm, x, h, &c, handles, std::move(open_blocks));
  return {result.y, result.h_n, *result.c_n};
}

std::tuple<Tensor, Tensor> run_prepared_gru(const Tensor& x, const Tensor& h, Integers handles,
                                            Integers open_blocks) {
  StackResult result = run_stack(Cell::gru, x, h, nullptr, handles, std::move(open_blocks));
  return {result.y, result.h_n};
}

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("run_prepared_lstm", TORCH_BOX(&blockgate::run_prepared_lstm));
  m.impl("run_prepared_gru", TORCH_BOX(&blockgate::run_prepared_gru));
}
