// One step of a gated recurrence on a team: the products that enter the cell, then the cell.
#pragma once

#include "host/recurrent.h"

namespace blockgate {

// One gated product of the step, and what is added beside it.
template <class T>
struct CellInput {
  GatedStep<T> step;
  const T* bias;  // (gates * size) or null
  T* sums() const { return step.product.y; }
};

// The sums that enter the cell's gates: start (tokens, gates * size; null: 0), then every input in
// turn, first its bias, then its blocks. Inputs with the same `sums` are added up, others stay apart.
template <class T>
struct CellStep {
  const T* start;
  const CellInput<T>* inputs;
  int64_t count, tokens;
  CellForward<T> cell;
  int64_t gates() const { return cell_gates(cell.cell); }
  int64_t out() const { return gates() * cell.size; }
  // Whether the sums of input i begin with its bias.
  bool begins(int64_t i) const { return i == 0 || inputs[i].sums() != inputs[0].sums(); }
};

// The sums of one token before any block: a row at a time, since memory likes long runs.
template <class T>
void start_task(const CellStep<T>& step, int64_t token) {
  const int64_t out = step.out();
  for (int64_t i = 0; i < step.count; ++i)
    if (step.begins(i))
      typed_kernels<T>().add_bias(i == 0 && step.start ? step.start + token * out : nullptr,
                                  step.inputs[i].bias, 1, out, 0, out,
                                  step.inputs[i].sums() + token * out);
}

// Adds the bias of input i to some outputs, unless it was there from the start.
template <class T>
void add_bias(const CellStep<T>& step, int64_t i, int64_t begin, int64_t end) {
  T* sums = step.inputs[i].sums();
  if (!step.begins(i))
    typed_kernels<T>().add_bias(sums, step.inputs[i].bias, step.tokens, step.out(), begin, end, sums);
}

// All sums of some units: the outputs [gate * size + begin, gate * size + end) of all gates of the
// cell, each in one row of blocks of every input. `next` is where the units of the thread's next
// task begin, or -1; `begun` says that this task was one, and is told whether the next is.
template <class T>
void sum_task(const CellStep<T>& step, int64_t begin, int64_t end, int64_t next, bool& begun,
              std::byte* scratch) {
  const int64_t size = step.cell.size, calls = step.gates() * step.count;
  const int64_t block = step.inputs[0].step.product.grid.block_out;
  const int64_t panel = begin % block / PANEL, panel_end = ceil_div(end - begin / block * block, PANEL);
  const auto product_of = [&](int64_t call) -> const GatedStep<T>& {
    return step.inputs[call % step.count].step;
  };
  const auto row_of = [&](int64_t call, int64_t unit) {
    return (call / step.count * size + unit) / block;
  };
  for (int64_t call = 0; call < calls; ++call) {
    const int64_t first = call / step.count * size;
    add_bias(step, call % step.count, first + begin, first + end);
    const void* then = nullptr;
    if (step.tokens == 1 && call + 1 < calls)
      then = first_weights(product_of(call + 1).product, row_of(call + 1, begin), panel);
    else if (step.tokens == 1 && next >= 0)
      then = first_weights(product_of(0).product, row_of(0, next), next % block / PANEL);
    product_task(product_of(call), row_of(call, begin), panel, panel_end, then, scratch, begun);
    begun = then != nullptr;
  }
}

// Whether the gates of some units are whole rows of blocks, the same for every input: one task
// can then compute them, and the cell at once.
template <class T>
bool rows_are_units(const CellStep<T>& step) {
  const int64_t block = step.inputs[0].step.product.grid.block_out;
  return step.cell.size % block == 0 &&
         std::all_of(step.inputs, step.inputs + step.count, [&](const CellInput<T>& input) {
           return input.step.product.grid.block_out == block;
         });
}

// The gates of some steps (those of `step` or more), and the start of its sums.
template <class T>
void run_gates(TeamMember& member, const StepCut& cut, const GatedStep<T>* gates, int64_t count,
               const CellStep<T>& step, T* scratch) {
  run_gates(member, cut, gates, count, scratch, step.tokens,
            [&](int64_t token) { start_task(step, token); });
}

// After run_gates, the products and the cell. `reversed` walks through the weights from their end: what the last
// step read last is then still in the cache.
template <class T>
void run_cell(TeamMember& member, const StepCut& cut, const CellStep<T>& step, bool reversed,
              std::byte* scratch) {
  const auto& kernel = typed_kernels<T>();
  const int64_t size = step.cell.size;
  if (rows_are_units(step)) {
    const Grid& grid = step.inputs[0].step.product.grid;
    const int64_t rows = size / grid.block_out;
    const int64_t parts = cut.panel_parts(grid, step.inputs[0].step.product.packed.format, rows);
    const int64_t tasks = rows * parts, panels = packed_panels(grid);
    const auto place = [&](int64_t task) { return reversed ? tasks - 1 - task : task; };
    const auto begin_of = [&](int64_t at) {
      return at / parts * grid.block_out + panels * (at % parts) / parts * PANEL;
    };
    bool begun = false;
    member.phase_ahead(tasks, [&](int64_t i, int64_t next) {
      const int64_t at = place(i), begin = begin_of(at);
      const int64_t end = at / parts * grid.block_out +
                          smaller(grid.block_out, panels * (at % parts + 1) / parts * PANEL);
      sum_task(step, begin, end, next < tasks ? begin_of(place(next)) : -1, begun, scratch);
      for (int64_t t = 0; t < step.tokens; ++t) kernel.cell_forward(step.cell, t, begin, end);
    });
    return;
  }
  // Grids that differ, or rows of blocks across two gates of the cell: one input after the other.
  for (int64_t i = 0; i < step.count; ++i) {
    const CellInput<T>& input = step.inputs[i];
    const Grid& grid = input.step.product.grid;
    member.phase(grid.rows, [&](int64_t row) {
      const int64_t begin = row * grid.block_out;
      add_bias(step, i, begin, begin + outputs_of_row(grid, row));
      product_task(input.step, row, 0, packed_panels(grid), nullptr, scratch);
    });
  }
  member.phase(step.tokens, [&](int64_t t) { kernel.cell_forward(step.cell, t, 0, size); });
}

}  // namespace blockgate
