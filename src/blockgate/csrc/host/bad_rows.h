// NaN and inf in an input reach every output of its row, as they do in a dense layer.
//
// The product alone would hide them: a closed block never reads its part of the input.
#pragma once

#include "kernels.h"
#include "host/parallel.h"

#include <cstring>
#include <limits>
#include <type_traits>

namespace blockgate {

// By exponent bits, all ones for both: an integer test that the compiler turns into vectors.
template <class T>
bool all_finite(const T* values, int64_t count) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  constexpr Bits EXPONENT = sizeof(T) == 4 ? Bits(0x7f800000) : Bits(0x7ff0000000000000);
  Bits bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bad |= Bits((bits & EXPONENT) == EXPONENT);
  }
  return bad == 0;
}

// Fills with NaN the rows of y (tokens, outputs) whose row of x (tokens, inputs) isn't finite.
template <class T>
void spoil_bad_rows(const T* x, int64_t x_stride, int64_t tokens, int64_t inputs, T* y,
                    int64_t outputs) {
  run_tasks(tokens, threads_for(tokens * inputs), [&](int64_t t) {
    if (all_finite(x + t * x_stride, inputs)) return;
    for (int64_t o = 0; o < outputs; ++o)
      y[t * outputs + o] = std::numeric_limits<T>::quiet_NaN();
  });
}

}  // namespace blockgate
