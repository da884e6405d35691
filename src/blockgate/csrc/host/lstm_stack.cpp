#include "host/lstm_stack.h"

#include "host/lstm.h"

#include <cstring>

namespace blockgate {
namespace {

// A product of the stack with the memory for the intermediate results of one step.
class Product {
 public:
  Product(const PreparedLayer& layer, int64_t tokens, int64_t open_blocks, float* y)
      : layer_(layer), bad_(tokens) {
    step_.product = {.grid = layer.grid,
                     .packed = layer.weight.view,
                     .x = nullptr,
                     .x_stride = layer.grid.in,
                     .tokens = tokens,
                     .y = y};
    step_.bad = bad_.get();
    if (takes_steps(layer.weight.view.format)) quantised_ = quantised_room(layer.grid, tokens);
    step_.product.quantised = quantised_.view;
    if (!layer.gate) return;
    const PreparedGate& gate = *layer.gate;
    const auto score_layer = [](const GateLayer& l) {
      return ScoreLayer<float>{l.grid, static_cast<const float*>(l.weight.view.blocks), l.bias.data};
    };
    const int64_t scores = layer.grid.rows * layer.grid.cols;
    step_.gate = StepGate<float>{std::nullopt, score_layer(gate.scores), gate.key_offset,
                                 top_k_spec(scores, open_blocks, gate.groups, gate.normalise)};
    const int64_t kept = step_.gate->kept();
    if (gate.hidden) {
      step_.gate->hidden = score_layer(*gate.hidden);
      hidden_ = Buffer<float>(tokens * gate.hidden->grid.out);
    }
    scores_ = Buffer<float>(tokens * scores);
    gates_ = Buffer<float>(tokens * kept);
    indices_ = Buffer<int64_t>(tokens * kept);
    row_starts_ = Buffer<int32_t>(tokens * (layer.grid.rows + 1));
    step_.hidden = hidden_.get();
    step_.scores = scores_.get();
    step_.product.gates = step_.gates = gates_.get();
    step_.product.indices = step_.indices = indices_.get();
    step_.product.row_starts = step_.row_starts = row_starts_.get();
    step_.product.slots = kept;
  }

  GatedStep<float> at(const float* x) const {
    GatedStep<float> step = step_;
    step.product.x = x;
    // Not before: products move until their stack is complete.
    if (takes_steps(step.product.packed.format)) step.quantised = &quantised_;
    return step;
  }
  CellInput<float> input(const float* x) const { return {at(x), layer_.bias.data}; }

  // Multiply-adds of one step.
  int64_t work() const {
    const Grid& grid = layer_.grid;
    const int64_t tokens = step_.product.tokens;
    if (!step_.gate) return tokens * grid.out * grid.in;
    return tokens * (step_.product.slots * smaller(grid.block_out, grid.out) * packed_depth(grid) +
                     step_.gate->scores.grid.out * step_.gate->scores.grid.in);
  }

 private:
  const PreparedLayer& layer_;
  GatedStep<float> step_{};
  Buffer<float> hidden_, scores_, gates_;
  Buffer<int64_t> indices_;
  Buffer<int32_t> row_starts_;
  Buffer<uint8_t> bad_;
  QuantisedCopy quantised_;
};

// The steps of one layer; projected (steps, rows, 4 * size) is its input product.
void run_steps(const PreparedLayer& layer, int64_t open_blocks, const StackShape& shape,
               const float* projected, const float* h, const float* c, float* y, float* c_n) {
  const int64_t state = shape.rows * shape.size;
  const Buffer<float> activations(4 * state);
  const Product product(layer, shape.rows, open_blocks, activations.get());
  const StepCut cut{threads_for(product.work())};
  run_team(cut.threads, [&](TeamMember member) {
    const GatedStep<float> first = product.at(h);
    const StepScratch<float> scratch = step_scratch(&first, 1);
    for (int64_t t = 0; t < shape.steps; ++t) {
      const CellInput<float> input = product.input(t ? y + (t - 1) * state : h);
      const CellStep<float> step{projected + t * 4 * state, &input, 1, shape.rows,
                                 {shape.size, activations.get(), t ? c_n : c, c_n, y + t * state}};
      run_gates(member, cut, &input.step, 1, step, scratch.gate.get());
      run_cell(member, cut, step, t % 2, scratch.product.get());
    }
  });
}

}  // namespace

// A single step runs the whole stack in one parallel region. The gates of all recurrent products
// read states that are there from the start.
void run_single_step(const LstmStack& stack, const StackShape& shape, const float* x,
                     const States& states) {
  const int64_t state = shape.rows * shape.size;
  const Buffer<float> activations(4 * state);
  std::vector<Product> products;
  int64_t work = 0;
  for (size_t i = 0; i < stack.products.size(); ++i) {
    products.emplace_back(*stack.products[i], shape.rows, stack.open_blocks[i], activations.get());
    work += products.back().work();
  }
  std::vector<CellInput<float>> inputs;
  std::vector<GatedStep<float>> first;
  for (int64_t l = 0; l < shape.layers; ++l) {
    inputs.push_back(products[2 * l].input(l ? states.h_n + (l - 1) * state : x));
    inputs.push_back(products[2 * l + 1].input(states.h + l * state));
    if (l == 0) first.push_back(inputs[0].step);
    first.push_back(inputs[2 * l + 1].step);
  }
  std::vector<GatedStep<float>> all;
  for (const CellInput<float>& input : inputs) all.push_back(input.step);
  const StepCut cut{threads_for(work)};
  run_team(cut.threads, [&](TeamMember member) {
    const StepScratch<float> scratch = step_scratch(all.data(), int64_t(all.size()));
    for (int64_t l = 0; l < shape.layers; ++l) {
      const CellStep<float> step{nullptr, &inputs[2 * l], 2, shape.rows,
                                 {shape.size, activations.get(), states.c + l * state,
                                  states.c_n + l * state, states.h_n + l * state}};
      run_gates(member, cut, l ? &inputs[2 * l].step : first.data(),
                l ? 1 : int64_t(first.size()), step, scratch.gate.get());
      run_cell(member, cut, step, false, scratch.product.get());
    }
  });
}

void run_sequence(const LstmStack& stack, const StackShape& shape, const float* x,
                  const States& states, float* y) {
  const int64_t state = shape.rows * shape.size, tokens = shape.steps * shape.rows;
  const Buffer<float> projected(4 * shape.steps * state);
  for (int64_t l = 0; l < shape.layers; ++l) {
    const PreparedLayer& input = *stack.products[2 * l];
    run_layer(input, l ? y : x, input.grid.in, tokens, stack.open_blocks[2 * l], projected.get());
    // The input was read: its place takes the output of this layer.
    run_steps(*stack.products[2 * l + 1], stack.open_blocks[2 * l + 1], shape, projected.get(),
              states.h + l * state, states.c + l * state, y, states.c_n + l * state);
    std::memcpy(states.h_n + l * state, y + (shape.steps - 1) * state, state * sizeof(float));
  }
}

}  // namespace blockgate
