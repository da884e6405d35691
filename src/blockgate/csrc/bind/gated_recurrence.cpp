// gated_lstm and gated_gru: recurrences whose recurrent weight is a gated block product, training.
#include "bind/recurrent_tensors.h"
#include "host/cell.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>

namespace blockgate {
namespace {

struct Results {
  Tensor output, c, activations, hidden, scores, gates, indices;
};

// A gate's layer as one block, packed for this call.
template <class T>
struct PackedScores {
  Buffer<T> weight;
  ScoreLayer<T> layer;
};

template <class T>
PackedScores<T> pack_scores(const Dense<T>& weight, int64_t outputs, int64_t inputs, const T* bias) {
  const Grid grid = make_grid(outputs, inputs, outputs, inputs);
  Buffer<T> packed = pack_forward(grid, weight.data);
  const T* data = packed.get();
  return {std::move(packed), {grid, data, bias}};
}

template <class T>
Results run_forward(Cell cell, const Tensor& projected, const Tensor& h0, const Tensor* c0,
                    const Tensor& weight, const std::optional<Tensor>& bias,
                    const Tensor& gate_weight, const std::optional<Tensor>& gate_bias,
                    const std::optional<Tensor>& hidden_weight,
                    const std::optional<Tensor>& hidden_bias, const Integers& key,
                    const Integers& block, const Integers& selection,
                    const std::string& normalise) {
  const Dense<T> start = dense_of<T>(projected, "projected", 3);
  const RecurrentShape shape = recurrent_shape(cell, projected.size(0), h0, weight, block);
  check_steps(projected, "projected", shape, shape.grid.out);
  const Dense<T> h = state_of<T>(h0, "h0", shape), c = c0 ? state_of<T>(*c0, "c0", shape) : h;
  const Dense<T> w = dense_of<T>(weight, "weight", 2);
  const Dense<T> b = bias_of<T>(bias, "bias", shape.grid.out, weight);
  const GateShape gate = gate_shape<T>(shape, gate_weight, hidden_weight, key);
  const Dense<T> gate_b = bias_of<T>(gate_bias, "gate_bias", gate.scores, weight);
  const PackedScores<T> scores = pack_scores<T>(dense_of<T>(gate_weight, "gate_weight", 2),
                                                gate.scores, gate.scored, gate_b.data);
  const Dense<T> hidden_b = bias_of<T>(hidden_weight ? hidden_bias : std::nullopt, "hidden_bias",
                                       gate.scored, weight);
  PackedScores<T> hidden;
  if (hidden_weight)
    hidden = pack_scores<T>(dense_of<T>(*hidden_weight, "hidden_weight", 2), gate.scored,
                            gate.key.size, hidden_b.data);
  const Selection chosen = selection_of(selection);
  StepGate<T> step_gate{std::nullopt, scores.layer, gate.key.offset,
                        top_k_spec(gate.scores, chosen.open_blocks, chosen.groups,
                                   normalise_of(normalise))};
  if (hidden_weight) step_gate.hidden = hidden.layer;
  const Buffer<T> packed = pack_forward(shape.grid, w.data);

  const bool lstm = cell == Cell::lstm;
  const int64_t steps = shape.steps, rows = shape.rows, kept = step_gate.kept();
  const auto result = [&](int64_t width) {
    return empty_tensor({steps, rows, width}, SCALAR_TYPE<T>);
  };
  const Tensor output = result(shape.size), cells = result(shape.size);
  const Tensor activations = result(shape.grid.out), all_scores = result(gate.scores);
  const Tensor all_hidden =
      hidden_weight ? result(gate.scored) : empty_tensor({int64_t(0)}, SCALAR_TYPE<T>);
  const Tensor gates = result(kept), indices = empty_tensor({steps, rows, kept}, ScalarType::Long);

  const Buffer<int32_t> row_starts(rows * (shape.grid.rows + 1));
  const Buffer<uint8_t> bad(rows);
  const Counters selected = counters(rows);
  const StepCut cut{step_threads(shape, gate, kept)};
  const auto step_at = [&](int64_t t) -> GatedStep<T> {
    T* g = data_of<T>(gates) + t * rows * kept;
    int64_t* i = data_of<int64_t>(indices) + t * rows * kept;
    const T* x = t ? data_of<T>(output) + (t - 1) * rows * shape.size : h.data;
    return {step_gate,
            {.grid = shape.grid,
             .packed = {packed.get(), nullptr, Format::float32},
             .x = x,
             .x_stride = shape.size,
             .tokens = rows,
             .y = data_of<T>(activations) + t * rows * shape.grid.out,
             .gates = g,
             .indices = i,
             .slots = kept,
             .row_starts = row_starts.get(),
             .then = nullptr},
            hidden_weight ? data_of<T>(all_hidden) + t * rows * gate.scored : nullptr,
            data_of<T>(all_scores) + t * rows * gate.scores,
            g,
            i,
            row_starts.get(),
            bad.get(),
            selected.get()};
  };
  run_team(cut.threads, [&](TeamMember member) {
    const GatedStep<T> first = step_at(0);
    const StepScratch<T> scratch = step_scratch(&first, 1);
    for (int64_t t = 0; t < steps; ++t) {
      const CellInput<T> input{step_at(t), b.data};
      const int64_t at = t * rows * shape.size;
      T* c_t = data_of<T>(cells) + at;
      const T* from_input = start.data + t * rows * shape.grid.out;
      const T* c_before = t ? c_t - rows * shape.size : c.data;
      const CellStep<T> step{lstm ? from_input : nullptr, &input, 1, rows,
                             {cell, shape.size, input.sums(), lstm ? nullptr : from_input,
                              lstm ? c_before : input.step.product.x, c_t, data_of<T>(output) + at}};
      run_gates(member, cut, &input.step, 1, step, scratch.gate.get());
      run_cell(member, cut, step, t % 2, scratch.product.get());
    }
  });
  return {output, cells, activations, all_hidden, all_scores, gates, indices};
}

// The last of the steps of a tensor (steps, rows, size), by itself.
Tensor last_step(const Tensor& all) {
  const int64_t rows = all.size(1), size = all.size(2);
  const Tensor last = empty_tensor({rows, size}, all.scalar_type());
  const int64_t bytes = rows * size * int64_t(all.element_size());
  std::memcpy(last.mutable_data_ptr(),
              static_cast<const std::byte*>(all.const_data_ptr()) + (all.size(0) - 1) * bytes, bytes);
  return last;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gated_lstm(
    const Tensor& projected, const Tensor& h0, const Tensor& c0, const Tensor& weight,
    const std::optional<Tensor>& bias, const Tensor& gate_weight,
    const std::optional<Tensor>& gate_bias, const std::optional<Tensor>& hidden_weight,
    const std::optional<Tensor>& hidden_bias, Integers key, Integers block, Integers selection,
    const std::string& normalise) {
  const Results made = with_float_type(projected, "projected", [&](auto zero) {
    return run_forward<decltype(zero)>(Cell::lstm, projected, h0, &c0, weight, bias, gate_weight,
                                       gate_bias, hidden_weight, hidden_bias, key, block, selection,
                                       normalise);
  });
  return {made.output, last_step(made.c), made.c,     made.activations,
          made.hidden, made.scores,       made.gates, made.indices};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gated_gru(
    const Tensor& projected, const Tensor& h0, const Tensor& weight,
    const std::optional<Tensor>& bias, const Tensor& gate_weight,
    const std::optional<Tensor>& gate_bias, const std::optional<Tensor>& hidden_weight,
    const std::optional<Tensor>& hidden_bias, Integers key, Integers block, Integers selection,
    const std::string& normalise) {
  const Results made = with_float_type(projected, "projected", [&](auto zero) {
    return run_forward<decltype(zero)>(Cell::gru, projected, h0, nullptr, weight, bias, gate_weight,
                                       gate_bias, hidden_weight, hidden_bias, key, block, selection,
                                       normalise);
  });
  return {made.output, made.c,     made.activations, made.hidden,
          made.scores, made.gates, made.indices};
}

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("gated_lstm", TORCH_BOX(&blockgate::gated_lstm));
  m.impl("gated_gru", TORCH_BOX(&blockgate::gated_gru));
}
