// Inputs for integer weights: each token's part in a column of blocks as int16 steps of one size.
#pragma once

#include "isa/vec.h"

namespace blockgate::BLOCKGATE_ISA {

// steps[k] = round to nearest even of x[k] / size, padded to an even number with 0. Returns
// size = max|x| / largest_steps, but at least the smallest normal number, so that the division is
// safe for zeros and denormals too. NaN or inf among the inputs: size NaN, steps 0.
inline float quantise(const float* x, int64_t depth, int64_t largest_steps, int16_t* steps) {
  // As integers, bits without the sign sort like the numbers, NaN and inf last.
  int32_t largest_bits = 0;
  for (int64_t k = 0; k < depth; ++k) {
    int32_t bits;
    __builtin_memcpy(&bits, x + k, sizeof bits);
    bits &= 0x7fffffff;
    largest_bits = largest_bits < bits ? bits : largest_bits;
  }
  steps[depth - 1 + depth % 2] = 0;
  if (largest_bits >= 0x7f800000) {
    for (int64_t k = 0; k < depth; ++k) steps[k] = 0;
    return __builtin_nanf("");
  }
  float largest;
  __builtin_memcpy(&largest, &largest_bits, sizeof largest);
  constexpr float SMALLEST_NORMAL = 0x1p-126f;
  const float size = largest / float(largest_steps);
  const float divisor = size < SMALLEST_NORMAL ? SMALLEST_NORMAL : size;
  // Adding 1.5 * 2^23 leaves no bits below one: the addition itself rounds to nearest even.
  constexpr float ROUNDER = 0x1.8p23f;
  for (int64_t k = 0; k < depth; ++k)
    steps[k] = int16_t(int32_t((x[k] / divisor + ROUNDER) - ROUNDER));
  return divisor;
}

}  // namespace blockgate::BLOCKGATE_ISA
