// One step of a gated recurrence, cut into phases for a team: scores, selection, product.
#pragma once

#include "host/bad_rows.h"
#include "host/quantised_rows.h"
#include "host/select.h"
#include "host/team.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <optional>

namespace blockgate {

// An ordinary linear layer on packed blocks of T, in one column of blocks: a layer of a gate.
template <class T>
struct ScoreLayer {
  Grid grid;
  const T* weight;
  const T* bias;
};

// The gate of a product and its selection; `scores` comes after `hidden`, if there is one.
template <class T>
struct StepGate {
  std::optional<ScoreLayer<T>> hidden;
  ScoreLayer<T> scores;
  int64_t key_offset;
  TopK spec;
  int64_t kept() const { return spec.groups * spec.open_blocks; }
};

// A gated product (or one with every block open) and the place of its intermediate results.
template <class T>
struct GatedStep {
  std::optional<StepGate<T>> gate;
  StepProduct<T> product;
  T *hidden, *scores, *gates;
  int64_t* indices;
  int32_t* row_starts;  // (tokens, rows + 1)
  uint8_t* bad;         // (tokens): whether a row of x isn't finite
  // (tokens): parts of the selection that are done; 0 between two steps.
  std::atomic<int32_t>* selected;
  const QuantisedCopy* quantised = nullptr;  // where the format takes steps
};

using Counters = Buffer<std::atomic<int32_t>>;
inline Counters counters(int64_t count) {
  Counters made(count);
  for (int64_t i = 0; i < count; ++i) new (&made[i]) std::atomic<int32_t>(0);
  return made;
}

// How the phases of a step are cut. None of the cuts changes a bit of the result.
struct StepCut {
  // Panels of a score layer that tasks don't divide: chains enough to fill the pipeline.
  static constexpr int64_t SCORE_PANELS = 4;

  int64_t threads;

  // Panels of a score layer, several to a task.
  int64_t score_parts(const Grid& grid) const {
    return smaller(ceil_div(packed_panels(grid), SCORE_PANELS), larger(1, 8 * threads / grid.rows));
  }
  template <class T>
  int64_t score_tasks(const ScoreLayer<T>& layer) const {
    return layer.grid.rows * score_parts(layer.grid);
  }
  // Parts of the selection for one token.
  int64_t select_parts(const TopK& spec, int64_t tokens) const {
    return threads == 1 || tokens >= threads ? 1 : smaller(spec.groups, 2 * threads);
  }
  // Parts of a row of blocks. A part keeps at least four panels, or tiles would become thin; and of
  // each block a run of memory that is worth its beginning, unless that left threads without work.
  int64_t panel_parts(const Grid& grid, Format format, int64_t rows) const {
    constexpr int64_t RUN_BYTES = 4096;
    const int64_t runs = packed_panels(grid) * panel_bytes(format, grid) / RUN_BYTES;
    const int64_t wanted =
        smaller(ceil_div(8 * threads, rows), larger(runs, ceil_div(2 * threads, rows)));
    return larger(1, smaller(packed_panels(grid) / 4, wanted));
  }
};

template <class T>
void score_panels(const ScoreLayer<T>& layer, const T* x, int64_t stride, const ForwardTask& task,
                  T* y, T* scratch) {
  const PackedView packed{layer.weight, nullptr, Format::float32};
  if constexpr (sizeof(T) == sizeof(float)) {
    if (task.token_end == 1) {
      const OpenBlock whole{int32_t(task.row_begin), 0, 1};
      return kernels().stream({.grid = layer.grid,
                               .x = x,
                               .packed = packed,
                               .bias = layer.bias,
                               .y = y,
                               .then = nullptr},
                              task.row_begin, task.panel_begin, task.panel_end, &whole, 1);
    }
  }
  typed_kernels<T>().forward({.grid = layer.grid,
                              .x = {x, layer.grid.in, stride},
                              .row_major = nullptr,
                              .packed = packed,
                              .bias = layer.bias,
                              .y = y,
                              .groups = {nullptr, nullptr}},
                             task, scratch);
}

template <class T>
void score_task(const StepCut& cut, const ScoreLayer<T>& layer, const T* x, int64_t stride,
                int64_t tokens, bool relu, T* y, int64_t task, T* scratch) {
  const Grid& grid = layer.grid;
  const int64_t parts = cut.score_parts(grid), row = task / parts, part = task % parts;
  const int64_t units = ceil_div(packed_panels(grid), StepCut::SCORE_PANELS);
  const int64_t begin = units * part / parts * StepCut::SCORE_PANELS;
  const int64_t end = smaller(units * (part + 1) / parts * StepCut::SCORE_PANELS,
                              ceil_div(outputs_of_row(grid, row), PANEL));
  const int64_t width = smaller(end * PANEL, outputs_of_row(grid, row)) - begin * PANEL;
  if (width <= 0) return;
  score_panels(layer, x, stride, {row, row + 1, begin, end, 0, tokens}, y, scratch);
  if (!relu) return;
  for (int64_t t = 0; t < tokens; ++t) {
    T* values = y + t * grid.out + row * grid.block_out + begin * PANEL;
    for (int64_t i = 0; i < width; ++i) values[i] = values[i] <= 0 ? T(0) : values[i];
  }
}

// One part of the selection for one token. Whoever does the last one goes on to what the token's
// product needs to know.
template <class T>
void select_task(const GatedStep<T>& step, int64_t token, int64_t part, int64_t parts, T* scratch) {
  const StepProduct<T>& product = step.product;
  const Grid& grid = product.grid;
  // With every block open nothing hides what is wrong with x.
  if (!step.gate) {
    step.bad[token] = 0;
    return;
  }
  const TopK& spec = step.gate->spec;
  const int64_t kept = step.gate->kept();
  T* gates = step.gates + token * kept;
  int64_t* indices = step.indices + token * kept;
  typed_kernels<T>().select(spec, spec.groups * part / parts, spec.groups * (part + 1) / parts,
                            step.scores + token * spec.scores, gates, indices, scratch);
  if (step.selected[token].fetch_add(1, std::memory_order_acq_rel) + 1 < parts) return;
  step.selected[token].store(0, std::memory_order_relaxed);
  step.bad[token] = !all_finite(product.x + token * product.x_stride, grid.in);
  typed_kernels<T>().normalise(spec, gates);
  int32_t* starts = step.row_starts + token * (grid.rows + 1);
  int64_t slot = 0;
  for (int64_t row = 0; row < grid.rows; ++row) {
    starts[row] = int32_t(slot);
    while (slot < kept && indices[slot] < (row + 1) * grid.cols) ++slot;
  }
  starts[grid.rows] = int32_t(slot);
}

// Inputs of one token for integer weights.
template <class T>
void quantise_task(const GatedStep<T>& step, int64_t token) {
  const StepProduct<T>& product = step.product;
  if constexpr (sizeof(T) == sizeof(float))
    quantise_tokens(product.grid, product.packed.format, product.x, product.x_stride, token, token + 1, *step.quantised);
}

// Elements of T that the first two tasks above need.
template <class T>
int64_t gate_scratch(const StepGate<T>& gate, int64_t tokens) {
  const auto layer = [&](const ScoreLayer<T>& l) {
    return typed_kernels<T>().forward_scratch(l.grid, 1, tokens);
  };
  return std::max({layer(gate.scores), gate.hidden ? layer(*gate.hidden) : 0,
                   top_k_scratch(gate.spec)});
}

// Scratch of one member of a team for any task of these steps.
template <class T>
struct StepScratch {
  Buffer<T> gate;
  Buffer<std::byte> product;
};

template <class T>
StepScratch<T> step_scratch(const GatedStep<T>* steps, int64_t count) {
  int64_t gate = 0, product = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t tokens = steps[i].product.tokens;
    if (steps[i].gate) gate = std::max(gate, gate_scratch(*steps[i].gate, tokens));
    product = std::max(product, typed_kernels<T>().step_product_scratch(steps[i].product.grid, tokens));
  }
  return {Buffer<T>(gate), Buffer<std::byte>(product)};
}

// All phases of the gates of some independent steps. Beside the last one inputs are prepared for
// integer weights, and others(0) .. others(other_tasks - 1) are done.
template <class T, class Others>
void run_gates(TeamMember& member, const StepCut& cut, const GatedStep<T>* steps, int64_t count,
               T* scratch, int64_t other_tasks, const Others& others) {
  // Runs task(step, i) for each step's own number of tasks, and more(i) after them, in one phase.
  const auto phase = [&](const auto& tasks_of, const auto& task, int64_t more_tasks,
                         const auto& more) {
    int64_t total = more_tasks;
    for (int64_t s = 0; s < count; ++s) total += tasks_of(steps[s]);
    member.phase(total, [&](int64_t i) {
      for (int64_t s = 0; s < count; i -= tasks_of(steps[s++]))
        if (i < tasks_of(steps[s])) return task(steps[s], i);
      more(i);
    });
  };
  const auto nothing = [](int64_t) {};
  phase(
      [&](const GatedStep<T>& s) {
        return s.gate && s.gate->hidden ? cut.score_tasks(*s.gate->hidden) : 0;
      },
      [&](const GatedStep<T>& s, int64_t i) {
        score_task(cut, *s.gate->hidden, s.product.x + s.gate->key_offset, s.product.x_stride,
                   s.product.tokens, true, s.hidden, i, scratch);
      },
      0, nothing);
  phase([&](const GatedStep<T>& s) { return s.gate ? cut.score_tasks(s.gate->scores) : 0; },
        [&](const GatedStep<T>& s, int64_t i) {
          const bool hidden = s.gate->hidden.has_value();
          score_task(cut, s.gate->scores,
                     hidden ? s.hidden : s.product.x + s.gate->key_offset,
                     hidden ? s.gate->scores.grid.in : s.product.x_stride, s.product.tokens, false,
                     s.scores, i, scratch);
        },
        0, nothing);
  const auto parts_of = [&](const GatedStep<T>& s) {
    return s.gate ? cut.select_parts(s.gate->spec, s.product.tokens) : 1;
  };
  phase(
      [&](const GatedStep<T>& s) { return (parts_of(s) + (s.quantised ? 1 : 0)) * s.product.tokens; },
      [&](const GatedStep<T>& s, int64_t i) {
        const int64_t parts = parts_of(s), selections = parts * s.product.tokens;
        if (i < selections) select_task(s, i / parts, i % parts, parts, scratch);
        else quantise_task(s, i - selections);
      },
      other_tasks, others);
}

// The weights that the only token reads first in a row of blocks, from some panel on; null if none.
template <class T>
const void* first_weights(const StepProduct<T>& product, int64_t row, int64_t panel) {
  const Grid& grid = product.grid;
  int64_t block = row * grid.cols;
  if (product.gates) {
    if (product.row_starts[row] == product.row_starts[row + 1]) return nullptr;
    block = product.indices[product.row_starts[row]];
  }
  const Format format = product.packed.format;
  // In double, panels are of double.
  return static_cast<const std::byte*>(product.packed.blocks) +
         (block * block_bytes(format, grid) + panel * panel_bytes(format, grid)) *
             int64_t(sizeof(T) / sizeof(float));
}

// The product for some panels of one row of blocks; a bad row of x makes all of its outputs NaN.
template <class T>
void product_task(const GatedStep<T>& step, int64_t row, int64_t panel_begin, int64_t panel_end,
                  const void* then, std::byte* scratch, bool begun = false) {
  StepProduct<T> product = step.product;
  product.then = then;
  product.begun = begun;
  typed_kernels<T>().step_product(product, row, panel_begin, panel_end, scratch);
  const int64_t begin = row * product.grid.block_out + panel_begin * PANEL;
  const int64_t end = row * product.grid.block_out +
                      smaller(panel_end * PANEL, outputs_of_row(product.grid, row));
  for (int64_t t = 0; t < product.tokens; ++t)
    if (step.bad[t])
      for (int64_t o = begin; o < end; ++o)
        product.y[t * product.grid.out + o] = std::numeric_limits<T>::quiet_NaN();
}

}  // namespace blockgate
