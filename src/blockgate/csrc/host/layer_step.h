// Prepared layers as steps on a team of threads.
#pragma once

#include "host/prepared.h"
#include "host/recurrent.h"

namespace blockgate __attribute__((visibility("hidden"))) {

// A prepared layer as one step on a team, with the memory for its intermediate results.
class LayerStep {
 public:
  LayerStep(const PreparedLayer& layer, int64_t tokens, int64_t open_blocks, float* y)
      : layer_(layer), bad_(tokens), selected_(counters(tokens)) {
    step_.product = {.grid = layer.grid,
                     .packed = layer.weight.view(),
                     .x = nullptr,
                     .x_stride = layer.grid.in,
                     .tokens = tokens,
                     .y = y};
    step_.bad = bad_.get();
    step_.selected = selected_.get();
    if (takes_steps(layer.weight.format)) quantised_ = quantised_room(layer.grid, tokens);
    step_.product.quantised = quantised_.view;
    if (!layer.gate) return;
    const PreparedGate& gate = *layer.gate;
    const auto score_layer = [](const GateLayer& l) {
      return ScoreLayer<float>{l.grid, static_cast<const float*>(l.weight.view().blocks), l.bias.data()};
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
    // Not before: steps move until their stack is complete.
    if (takes_steps(step.product.packed.format)) step.quantised = &quantised_;
    return step;
  }
  const float* bias() const { return layer_.bias.data(); }

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
  Counters selected_;
  QuantisedCopy quantised_;
};

}  // namespace blockgate
