// gated_lstm_backward and gated_gru_backward: back-propagation through time.
//
// Only what one step needs of the next is computed step by step: the cell, the gradient of h, and
// that of the gates and their key. The gradient of the weight is one product over all steps.
#include "bind/recurrent_tensors.h"
#include "host/select.h"
#include "host/team.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>

namespace blockgate {
namespace {

// What a step hands back to the state before it, `carry`, is the gradient of an LSTM's c, and the part of the gradient
// of a GRU's h that passes no product. `input` is empty where it equals `sums`.
struct Results {
  Tensor sums, input, h, carry, weight, scores, hidden;
};

// Where the entries of each step begin: positions[t * num_blocks + block], t = 0 .. steps.
template <class T>
Buffer<int64_t> step_positions(const Groups<T>& groups, const RecurrentShape& shape) {
  const int64_t num_blocks = shape.grid.rows * shape.grid.cols;
  Buffer<int64_t> positions((shape.steps + 1) * num_blocks);
  run_tasks(num_blocks, threads_for(groups.starts[num_blocks] * 8), [&](int64_t block) {
    int64_t at = groups.starts[block];
    for (int64_t t = 0; t <= shape.steps; ++t) {
      while (at < groups.starts[block + 1] && groups.entries[at].token < t * shape.rows) ++at;
      positions[t * num_blocks + block] = at;
    }
  });
  return positions;
}

template <class T>
Results run_backward(Cell cell, const Tensor& weight, const Tensor& gate_weight,
                     const std::optional<Tensor>& hidden_weight, const Tensor& h0,
                     const Tensor* c0, const Tensor& output, const Tensor& cells,
                     const Tensor& activations, const Tensor& hidden, const Tensor& scores,
                     const Tensor& gates, const Tensor& indices,
                     const std::optional<Tensor>& grad_output,
                     const std::optional<Tensor>& grad_c_n, const Integers& key,
                     const Integers& block, const Integers& selection,
                     const std::string& normalise, bool need_weight) {
  check_tensor(output, "output", SCALAR_TYPE<T>, 3);
  check_tensor(gates, "gates", SCALAR_TYPE<T>, 3);
  const RecurrentShape shape = recurrent_shape(cell, output.size(0), h0, weight, block);
  const Grid& grid = shape.grid;
  const GateShape gate = gate_shape<T>(shape, gate_weight, hidden_weight, key);
  const int64_t steps = shape.steps, rows = shape.rows, size = shape.size;
  const Selection choice = selection_of(selection);
  const TopK spec = top_k_spec(gate.scores, choice.open_blocks, choice.groups,
                               normalise_of(normalise));
  const int64_t num_blocks = gate.scores, kept = spec.groups * spec.open_blocks;
  const int64_t tokens = steps * rows;
  const Dense<T> w = dense_of<T>(weight, "weight", 2);
  const Dense<T> gate_w = dense_of<T>(gate_weight, "gate_weight", 2);
  const Dense<T> hidden_w = hidden_weight ? dense_of<T>(*hidden_weight, "hidden_weight", 2) : gate_w;
  const Dense<T> first_h = state_of<T>(h0, "h0", shape);
  const Dense<T> first_c = c0 ? state_of<T>(*c0, "c0", shape) : first_h;
  const Dense<T> h = steps_of<T>(output, "output", shape, size);
  const Dense<T> c = steps_of<T>(cells, "cells", shape, size);
  const Dense<T> activation = steps_of<T>(activations, "activations", shape, grid.out);
  const Dense<T> score = steps_of<T>(scores, "scores", shape, gate.scores);
  const Dense<T> hidden_layer =
      hidden_weight ? steps_of<T>(hidden, "hidden", shape, gate.scored) : score;
  const Dense<T> value = steps_of<T>(gates, "gates", shape, kept);
  const Dense<int64_t> index = steps_of<int64_t>(indices, "indices", shape, kept);
  const Dense<T> grad_h_out =
      grad_output ? steps_of<T>(*grad_output, "grad_output", shape, size) : Dense<T>{h0, nullptr};
  const Dense<T> grad_c_last =
      grad_c_n ? state_of<T>(*grad_c_n, "grad_c_n", shape) : Dense<T>{h0, nullptr};

  const bool lstm = cell == Cell::lstm;
  const Tensor grad_sums = empty_tensor({steps, rows, grid.out}, SCALAR_TYPE<T>);
  const Tensor grad_input = lstm ? empty_tensor({int64_t(0)}, SCALAR_TYPE<T>)
                                 : empty_tensor({steps, rows, grid.out}, SCALAR_TYPE<T>);
  const Tensor grad_h = empty_tensor({rows, size}, SCALAR_TYPE<T>);
  const Tensor carry = empty_tensor({rows, size}, SCALAR_TYPE<T>);
  const Tensor grad_scores = empty_tensor({steps, rows, gate.scores}, SCALAR_TYPE<T>);
  const Tensor grad_hidden = hidden_weight
      ? empty_tensor({steps, rows, gate.scored}, SCALAR_TYPE<T>)
      : empty_tensor({int64_t(0)}, SCALAR_TYPE<T>);
  const Tensor grad_weight = need_weight ? empty_tensor({grid.out, grid.in}, SCALAR_TYPE<T>)
                                         : empty_tensor({int64_t(0)}, SCALAR_TYPE<T>);

  const GroupedGates<T> groups =
      group_by_block<T>(value.data, index.data, tokens, kept, num_blocks);
  const Buffer<int64_t> positions = step_positions(groups.view(), shape);
  // The states before each step, side by side as the products want them.
  const Buffer<T> before(tokens * size);
  std::memcpy(before.get(), first_h.data, rows * size * sizeof(T));
  std::memcpy(before.get() + rows * size, h.data, (steps - 1) * rows * size * sizeof(T));
  std::memset(data_of<T>(grad_h), 0, rows * size * sizeof(T));
  if (grad_c_last.data) std::memcpy(data_of<T>(carry), grad_c_last.data, rows * size * sizeof(T));
  else std::memset(data_of<T>(carry), 0, rows * size * sizeof(T));

  {
    const Buffer<T> packed = pack_input_grad(grid, w.data);
    const Buffer<T> grad_gates(rows * kept);
    const auto& kernel = typed_kernels<T>();
    const Buffer<int64_t> all_runners(rows * spec.groups);
    const Buffer<T> all_scratch(rows * top_k_scratch(spec));
    // Through the cell of step t, for one row.
    const auto cell_task = [&](int64_t t, int64_t row) {
      const int64_t at = t * rows * size, sums = t * rows * grid.out;
      const T* state = lstm ? (t ? c.data + at - rows * size : first_c.data) : before.get() + at;
      kernel.cell_backward({cell, size, activation.data + sums, state, c.data + at,
                            grad_h_out.data ? grad_h_out.data + at : nullptr, data_of<T>(grad_h),
                            data_of<T>(carry), data_of<T>(grad_sums) + sums,
                            lstm ? nullptr : data_of<T>(grad_input) + sums},
                           row);
      std::memset(grad_gates.get() + row * kept, 0, kept * sizeof(T));
    };
    // Through selection and scores of step t to the key, for one row.
    const auto gate_task = [&](int64_t t, int64_t row) {
      const int64_t token = t * rows + row;
      T* grad_score = data_of<T>(grad_scores) + token * gate.scores;
      const int64_t* chosen = index.data + token * kept;
      int64_t* runners = all_runners.get() + row * spec.groups;
      kernel.top_k_backward(spec, grad_gates.get() + row * kept, score.data + token * gate.scores,
                            value.data + token * kept, chosen, grad_score, runners,
                            all_scratch.get() + row * top_k_scratch(spec));
      const auto add_scores = [&](T* to) {
        kernel.add_rows(gate_w.data, gate.scored, grad_score, chosen, kept, to);
        // With all blocks open the runner-up is one of the chosen.
        if (is_margin(spec.normalise) && kept < gate.scores)
          kernel.add_rows(gate_w.data, gate.scored, grad_score, runners, spec.groups, to);
      };
      T* grad_key = data_of<T>(grad_h) + row * size + gate.key.offset;
      if (!hidden_weight) return add_scores(grad_key);
      T* grad = data_of<T>(grad_hidden) + token * gate.scored;
      const T* values = hidden_layer.data + token * gate.scored;
      std::memset(grad, 0, gate.scored * sizeof(T));
      add_scores(grad);
      for (int64_t i = 0; i < gate.scored; ++i) grad[i] = values[i] <= 0 ? T(0) : grad[i];
      kernel.add_rows(hidden_w.data, gate.key.size, grad, nullptr, gate.scored, grad_key);
    };
    run_team(step_threads(shape, gate, kept), [&](TeamMember member) {
      member.phase(rows, [&](int64_t row) { cell_task(steps - 1, row); });
      for (int64_t t = steps - 1; t >= 0; --t) {
        const int64_t* begins = positions.get() + t * num_blocks;
        const StepInputGrad<T> args{grid,
                                    packed.get(),
                                    data_of<T>(grad_sums),
                                    before.get(),
                                    data_of<T>(grad_h),
                                    grad_gates.get(),
                                    kept,
                                    groups.entries.get(),
                                    begins,
                                    begins + num_blocks,
                                    t * rows,
                                    (t + 1) * rows};
        member.phase(grid.cols, [&](int64_t col) {
          // Back and forth through the weights: what was read last is still in the cache.
          kernel.step_input_grad(args, t % 2 ? grid.cols - 1 - col : col);
        });
        member.phase(rows, [&](int64_t row) {
          gate_task(t, row);
          if (t > 0) cell_task(t - 1, row);
        });
      }
    });
  }
  if (need_weight) {
    const BlockRowsCopy<T> x = block_rows<T>(before.get(), size, tokens, size, grid.block_in);
    const BlockRowsCopy<T> grad =
        block_rows<T>(data_of<T>(grad_sums), grid.out, tokens, grid.out, grid.block_out);
    run_weight_grad<T>({grid, grad.view, x.view, w.data, nullptr, nullptr,
                        data_of<T>(grad_weight), kept, groups.view()},
                       groups.starts[num_blocks]);
  }
  return {grad_sums, grad_input, grad_h, carry, grad_weight, grad_scores, grad_hidden};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients gated_lstm_backward(const Tensor& weight, const Tensor& gate_weight,
                              const std::optional<Tensor>& hidden_weight, const Tensor& h0,
                              const Tensor& c0, const Tensor& output, const Tensor& cells,
                              const Tensor& activations, const Tensor& hidden, const Tensor& scores,
                              const Tensor& gates, const Tensor& indices,
                              const std::optional<Tensor>& grad_output,
                              const std::optional<Tensor>& grad_c_n, Integers key, Integers block,
                              Integers selection, const std::string& normalise, bool need_weight) {
  const Results made = with_float_type(weight, "weight", [&](auto zero) {
    return run_backward<decltype(zero)>(Cell::lstm, weight, gate_weight, hidden_weight, h0, &c0,
                                        output, cells, activations, hidden, scores, gates, indices,
                                        grad_output, grad_c_n, key, block, selection, normalise,
                                        need_weight);
  });
  return {made.sums, made.h, made.carry, made.weight, made.scores, made.hidden};
}

Gradients gated_gru_backward(const Tensor& weight, const Tensor& gate_weight,
                             const std::optional<Tensor>& hidden_weight, const Tensor& h0,
                             const Tensor& output, const Tensor& from_state,
                             const Tensor& activations, const Tensor& hidden, const Tensor& scores,
                             const Tensor& gates, const Tensor& indices, const Tensor& grad_output,
                             Integers key, Integers block, Integers selection,
                             const std::string& normalise, bool need_weight) {
  const Results made = with_float_type(weight, "weight", [&](auto zero) {
    using T = decltype(zero);
    Results found = run_backward<T>(Cell::gru, weight, gate_weight, hidden_weight, h0, nullptr,
                                    output, from_state, activations, hidden, scores, gates, indices,
                                    grad_output, std::nullopt, key, block, selection, normalise,
                                    need_weight);
    T* h = data_of<T>(found.h);
    const T* carry = data_of<T>(found.carry);
    for (int64_t i = 0; i < h0.size(0) * h0.size(1); ++i) h[i] += carry[i];
    return found;
  });
  return {made.input, made.h, made.sums, made.weight, made.scores, made.hidden};
}

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("gated_lstm_backward", TORCH_BOX(&blockgate::gated_lstm_backward));
  m.impl("gated_gru_backward", TORCH_BOX(&blockgate::gated_gru_backward));
}
