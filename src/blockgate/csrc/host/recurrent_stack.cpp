#include "host/recurrent_stack.h"

#include "host/cell.h"
#include "host/layer_step.h"

#include <cstring>

namespace blockgate {
namespace {

CellInput<float> input_of(const LayerStep& step, const float* x) { return {step.at(x), step.bias()}; }

// Runs run(threads) on as many threads as `work` is worth or on one, whichever is the faster.
template <class Run>
void on_best_threads(Choice& choice, int64_t work, int64_t steps, const Run& run) {
  const int64_t threads = threads_for(work);
  if (threads == 1) return run(threads);
  Choice::Ways ways;
  ways.add({thread_count(), 0});
  ways.add({1, 0});
  choice.run(ways, double(steps), [&](Choice::Way way) { run(std::min(threads, way.threads)); });
}

// The steps of one layer; projected (steps, rows, gates * size) is its input product. c is null where the cell has none.
void run_steps(const PreparedLayer& layer, int64_t open_blocks, const StackShape& shape,
               const float* projected, const float* h, const float* c, float* y, float* c_n) {
  const bool lstm = shape.cell == Cell::lstm;
  const int64_t state = shape.rows * shape.size, sums = shape.gates() * state;
  const Buffer<float> activations(sums);
  const LayerStep product(layer, shape.rows, open_blocks, activations.get());
  on_best_threads(layer.choices->steps[shape.rows], product.work(), shape.steps, [&](int64_t threads) {
    const StepCut cut{threads};
    run_team(threads, [&](TeamMember member) {
      const GatedStep<float> first = product.at(h);
      const StepScratch<float> scratch = step_scratch(&first, 1);
      for (int64_t t = 0; t < shape.steps; ++t) {
        const float* before = t ? y + (t - 1) * state : h;
        const float* from_input = projected + t * sums;
        const CellInput<float> input = input_of(product, before);
        const CellStep<float> step{
            lstm ? from_input : nullptr, &input, 1, shape.rows,
            {shape.cell, shape.size, activations.get(), lstm ? nullptr : from_input,
             lstm ? (t ? c_n : c) : before, c_n, y + t * state}};
        run_gates(member, cut, &input.step, 1, step, scratch.gate.get());
        run_cell(member, cut, step, t % 2, scratch.product.get());
      }
    });
  });
}

}  // namespace

// A single step runs the whole stack in one parallel region. The gates of all recurrent products
// read states that are there from the start.
void run_single_step(const RecurrentStack& stack, const StackShape& shape, const float* x,
                     const States& states) {
  const bool lstm = shape.cell == Cell::lstm;
  const int64_t state = shape.rows * shape.size, sums = shape.gates() * state;
  const Buffer<float> activations(sums), apart(lstm ? 0 : sums);
  std::vector<LayerStep> products;
  int64_t work = 0;
  for (size_t i = 0; i < stack.products.size(); ++i) {
    float* y = lstm || i % 2 ? activations.get() : apart.get();
    products.emplace_back(*stack.products[i], shape.rows, stack.open_blocks[i], y);
    work += products.back().work();
  }
  std::vector<CellInput<float>> inputs;
  std::vector<GatedStep<float>> first;
  for (int64_t l = 0; l < shape.layers; ++l) {
    inputs.push_back(input_of(products[2 * l], l ? states.h_n + (l - 1) * state : x));
    inputs.push_back(input_of(products[2 * l + 1], states.h + l * state));
    if (l == 0) first.push_back(inputs[0].step);
    first.push_back(inputs[2 * l + 1].step);
  }
  std::vector<GatedStep<float>> all;
  for (const CellInput<float>& input : inputs) all.push_back(input.step);
  on_best_threads(stack.products[0]->choices->stack[shape.rows], work, 1, [&](int64_t threads) {
    const StepCut cut{threads};
    run_team(threads, [&](TeamMember member) {
      const StepScratch<float> scratch = step_scratch(all.data(), int64_t(all.size()));
      for (int64_t l = 0; l < shape.layers; ++l) {
        const int64_t at = l * state;
        const CellStep<float> step{
            nullptr, &inputs[2 * l], 2, shape.rows,
            {shape.cell, shape.size, activations.get(), apart.get(),
             lstm ? states.c + at : states.h + at, lstm ? states.c_n + at : nullptr, states.h_n + at}};
        run_gates(member, cut, l ? &inputs[2 * l].step : first.data(),
                  l ? 1 : int64_t(first.size()), step, scratch.gate.get());
        run_cell(member, cut, step, false, scratch.product.get());
      }
    });
  });
}

void run_sequence(const RecurrentStack& stack, const StackShape& shape, const float* x,
                  const States& states, float* y) {
  const int64_t state = shape.rows * shape.size, tokens = shape.steps * shape.rows;
  const Buffer<float> projected(shape.gates() * shape.steps * state);
  const bool lstm = shape.cell == Cell::lstm;
  for (int64_t l = 0; l < shape.layers; ++l) {
    const PreparedLayer& input = *stack.products[2 * l];
    run_layer(input, l ? y : x, input.grid.in, tokens, stack.open_blocks[2 * l], projected.get());
    // The input was read: its place takes the output of this layer.
    run_steps(*stack.products[2 * l + 1], stack.open_blocks[2 * l + 1], shape, projected.get(),
              states.h + l * state, lstm ? states.c + l * state : nullptr, y,
              lstm ? states.c_n + l * state : nullptr);
    std::memcpy(states.h_n + l * state, y + (shape.steps - 1) * state, state * sizeof(float));
  }
}

}  // namespace blockgate
