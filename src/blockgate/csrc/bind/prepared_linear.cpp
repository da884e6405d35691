// Layers prepared for many calls: with a gate, so that gate, top-k and product are one call, or dense.
#include "bind/groups.h"
#include "host/prepared.h"
#include "host/select.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <iterator>
#include <tuple>

namespace blockgate {
namespace {

PreparedLayer dense_layer(const Tensor& blocks, const Tensor& scale,
                          const std::optional<Tensor>& bias, const Integers& sizes,
                          const std::string& format) {
  const Grid grid = grid_of(sizes);
  return {grid, packed_weight_of(blocks, scale, grid, format_of(format)),
          kept_bias_of(bias, "bias", grid.out, blocks), std::nullopt};
}

// A packed float32 layer of `outputs` features in one column of blocks.
GateLayer gate_layer_of(const Tensor& weight, const std::optional<Tensor>& bias, const char* name,
                        int64_t outputs, int64_t inputs) {
  check_tensor(weight, name, ScalarType::Float, 4);
  // With several blocks each holds whole panels, so the block height can be read off the shape.
  const int64_t block_out = weight.size(0) == 1 ? outputs : weight.size(1) * PANEL;
  const Grid grid = make_grid(outputs, inputs, block_out, inputs);
  return {grid, packed_weight_of(weight, weight, grid, Format::float32),
          kept_bias_of(bias, name, outputs, weight)};
}

int64_t prepare_packed_linear(const Tensor& blocks, const Tensor& scale,
                              const std::optional<Tensor>& bias, Integers sizes,
                              const std::string& format) {
  return add_prepared(dense_layer(blocks, scale, bias, sizes, format));
}

int64_t prepare_dynamic_linear(const Tensor& blocks, const Tensor& scale,
                               const std::optional<Tensor>& bias, Integers sizes,
                               const std::string& format, const Tensor& gate_weight, const std::optional<Tensor>& gate_bias,
                               const std::optional<Tensor>& hidden_weight,
                               const std::optional<Tensor>& hidden_bias, Integers key,
                               int64_t groups, const std::string& normalise) {
  PreparedLayer layer = dense_layer(blocks, scale, bias, sizes, format);
  const int64_t num_blocks = layer.grid.rows * layer.grid.cols;
  const Key read = key_of(key, layer.grid.in, "input features");
  check_tensor(gate_weight, "gate_weight", ScalarType::Float, 4);
  // What the last layer reads: the hidden layer, whose size its packed depth tells, or the key.
  const int64_t scored = hidden_weight ? gate_weight.size(2) : read.size;
  std::optional<GateLayer> hidden;
  if (hidden_weight)
    hidden = gate_layer_of(*hidden_weight, hidden_bias, "hidden_weight or hidden_bias", scored,
                           read.size);
  layer.gate = PreparedGate{
      .scores = gate_layer_of(gate_weight, gate_bias, "gate_weight or gate_bias", num_blocks, scored),
      .hidden = hidden,
      .key_offset = read.offset,
      .groups = groups,
      .normalise = normalise_of(normalise),
  };
  return add_prepared(std::move(layer));
}

Tensor run_prepared_linear(const Tensor& x, int64_t handle, int64_t open_blocks) {
  const std::shared_ptr<const PreparedLayer> layer = find_prepared(handle);
  const Rows<float> rows = rows_of<float>(x, "x");
  check_size(x, "x", 1, layer->grid.in);
  const Tensor y = empty_tensor({rows.count, layer->grid.out}, ScalarType::Float);
  run_layer(*layer, rows.data, rows.stride, rows.count, open_blocks, data_of<float>(y));
  return y;
}

Choice& choice_of(const PreparedLayer& layer, const std::string& use, int64_t tokens) {
  STD_TORCH_CHECK(tokens > 0, "tokens: expected at least 1, got ", tokens);
  if (use == "layer") return layer.choices->layer[tokens];
  if (use == "steps") return layer.choices->steps[tokens];
  if (use == "likeliest") return layer.choices->likeliest[tokens];
  STD_TORCH_CHECK(use == "stack", "use: expected layer, steps, stack or likeliest, got ", use);
  return layer.choices->stack[tokens];
}

// What the calls of a prepared layer with so many tokens have taught: for each way its threads, its number in Regime and its
// seconds for a token, 0 if that isn't known (ways, 3); then the present way, and how many calls, looks and falls (4).
std::tuple<Tensor, Tensor> prepared_choice(int64_t handle, const std::string& use, int64_t tokens) {
  const std::shared_ptr<const PreparedLayer> layer = find_prepared(handle);
  const Choice::State state = choice_of(*layer, use, tokens).state();
  const Tensor ways = empty_tensor({int64_t(state.ways.count), int64_t(3)}, ScalarType::Double);
  double* row = data_of<double>(ways);
  for (int w = 0; w < state.ways.count; ++w, row += 3) {
    row[0] = double(state.ways.of[w].threads);
    row[1] = double(state.ways.of[w].kind);
    row[2] = state.seconds[w];
  }
  const Tensor counts = empty_tensor({int64_t(4)}, ScalarType::Long);
  const int64_t values[] = {state.present, state.calls, state.looks, state.falls};
  std::copy(std::begin(values), std::end(values), data_of<int64_t>(counts));
  return {ways, counts};
}

// -1: none is held.
void hold_way(int64_t way) { Choice::hold(int(way)); }

void release_prepared_linear(int64_t handle) { remove_prepared(handle); }

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("prepare_packed_linear", TORCH_BOX(&blockgate::prepare_packed_linear));
  m.impl("prepare_dynamic_linear", TORCH_BOX(&blockgate::prepare_dynamic_linear));
  m.impl("run_prepared_linear", TORCH_BOX(&blockgate::run_prepared_linear));
}

STABLE_TORCH_LIBRARY_IMPL(blockgate, CompositeExplicitAutograd, m) {
  m.impl("prepared_choice", TORCH_BOX(&blockgate::prepared_choice));
  m.impl("hold_way", TORCH_BOX(&blockgate::hold_way));
  m.impl("release_prepared_linear", TORCH_BOX(&blockgate::release_prepared_linear));
}
