// Instantiates every kernel for the instruction set whose vector header was included, as a table.
#pragma once

#include "isa/activation.h"
#include "isa/cell.h"
#include "isa/columns.h"
#include "isa/forward.h"
#include "isa/input_grad.h"
#include "isa/quantise.h"
#include "isa/screen.h"
#include "isa/step.h"
#include "isa/stream.h"
#include "isa/margin.h"
#include "isa/weight_grad.h"

namespace blockgate::BLOCKGATE_ISA {

template <class T>
constexpr TypedKernels<T> typed_set() {
  return {
      .forward = forward<T>,
      .input_grad = input_grad<T>,
      .weight_grad = weight_grad<T>,
      .forward_scratch = forward_scratch<T>,
      .input_grad_scratch = input_grad_scratch<T>,
      .weight_grad_scratch = weight_grad_scratch<T>,
      .select = select<T>,
      .normalise = normalise<T>,
      .top_k_backward = top_k_backward<T>,
      .transpose_to_panels = transpose_to_panels<T>,
      .copy_to_panels = copy_to_panels<T>,
      .step_product = step_product<T>,
      .step_product_scratch = step_product_scratch<T>,
      .step_input_grad = step_input_grad<T>,
      .add_bias = add_bias<T>,
      .cell_forward = cell_forward<T>,
      .cell_backward = cell_backward<T>,
      .add_rows = add_rows<T>,
  };
}

constexpr KernelTable make_table(const char* name, bool (*runs_here)()) {
  return {
      .name = name,
      .runs_here = runs_here,
      .f32 = typed_set<float>(),
      .f64 = typed_set<double>(),
      .stream_panels = STREAM_PANELS,
      .stream = stream,
      .columns = columns,
      .quantise = quantise,
      .screen_input = screen_input,
      .screen = screen,
      .exact_score = exact_score,
      .measure_row = measure_row,
      .quantise_by = quantise_by,
      .quantise_to_bytes = quantise_to_bytes,
      .takes_bytes = TAKES_BYTES,
      .activate = activate,
  };
}

}  // namespace blockgate::BLOCKGATE_ISA
