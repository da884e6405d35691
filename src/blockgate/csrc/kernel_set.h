// Instantiates every kernel for the instruction set of the including file, as a table.
#pragma once

#include "backward.h"
#include "forward.h"
#include "quantise.h"
#include "stream.h"
#include "topk.h"

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
          top_k_backward<T>};
}

constexpr KernelTable make_table(const char* name) {
  return {name, typed_set<float>(), typed_set<double>(), STREAM_PANELS, stream, quantise};
}

}  // namespace blockgate::BLOCKGATE_ISA
