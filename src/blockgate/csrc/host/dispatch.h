// The kernel table in use.
#pragma once

#include "kernels.h"

namespace blockgate {

// The table for this machine, or the lower one BLOCKGATE_ISA asks for. Throws on a bad request.
const KernelTable& kernels();

template <class T>
const TypedKernels<T>& typed_kernels();
template <>
inline const TypedKernels<float>& typed_kernels<float>() {
  return kernels().f32;
}
template <>
inline const TypedKernels<double>& typed_kernels<double>() {
  return kernels().f64;
}

}  // namespace blockgate
