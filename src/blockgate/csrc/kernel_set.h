// Instantiates every kernel for the instruction set of the including file, as a table.
#pragma once

#include "cell.h"
#include "forward.h"
#include "input_grad.h"
#include "quantise.h"
#include "step.h"
#include "stream.h"
#include "topk.h"
#include "weight_grad.h"

namespace blockgate::BLOCKGATE_ISA {

template <class T>
constexpr TypedKernels<T> typed_set() {
  return {forward<T>,
          input_grad<T>,
          weight_grad<T>,
          forward_scratch<T>,
          input_grad_scratch<T>,
          weight_grad_scratch<T>,
          top_k<T>,
          top_k_backward<T>,
          transpose_to_panels<T>,
          copy_to_panels<T>,
          step_product<T>,
          step_product_scratch<T>,
          step_input_grad<T>,
          add_bias<T>,
          cell_forward<T>,
          cell_backward<T>,
          add_rows<T>};
}

constexpr KernelTable make_table(const char* name) {
  return {name, typed_set<float>(), typed_set<double>(), STREAM_PANELS, stream, quantise};
}

}  // namespace blockgate::BLOCKGATE_ISA
