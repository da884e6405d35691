// Inputs for integer weights as whole steps, of one size in each column of blocks or in a whole row.
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

// size = (highest - lowest) / largest_steps with 0 between the two, and at least the smallest normal
// number; 0 is counted as step 0, so every input between is half a step off at most. NaN or inf among
// the inputs: size NaN, and only step 0.
inline RowSteps measure_row(const float* x, int64_t count, int64_t largest_steps) {
  constexpr int L = LANES<float>;
  Vec<float> lowest{}, highest{};
  Vec<int32_t> bad{};
  for (int64_t i = 0; i < count; i += L) {
    Vec<float> v{};
    if (i + L <= count) v = load(x + i);
    else __builtin_memcpy(&v, x + i, (count - i) * sizeof(float));
    lowest = v < lowest ? v : lowest;
    highest = v > highest ? v : highest;
    bad |= ((Vec<int32_t>)v & 0x7f800000) == 0x7f800000;
  }
  float low = 0, high = 0;
  for (int j = 0; j < L; ++j) {
    if (bad[j]) return {__builtin_nanf(""), 0, 0};
    low = lowest[j] < low ? lowest[j] : low;
    high = highest[j] > high ? highest[j] : high;
  }
  const float steps = float(largest_steps), size = high / steps - low / steps;
  const float divisor = size < 0x1p-126f ? 0x1p-126f : size;
  const auto below = int32_t((-low / divisor + 0x1.8p23f) - 0x1.8p23f);
  const int32_t down = below < largest_steps ? below : int32_t(largest_steps);
  return {divisor, -down, int32_t(largest_steps) - down};
}

BLOCKGATE_INLINE int32_t step_of(const RowSteps& row, float x) {
  constexpr float ROUNDER = 0x1.8p23f;
  const auto step = int32_t((x / row.size + ROUNDER) - ROUNDER);
  const int32_t raised = step < row.low ? row.low : step;
  return raised > row.high ? row.high : raised;
}

inline void quantise_by(const RowSteps& by, const float* x, int64_t depth, int16_t* steps) {
  const RowSteps row = by;
  steps[depth - 1 + depth % 2] = 0;
  if (row.low == row.high) {
    for (int64_t k = 0; k < depth; ++k) steps[k] = 0;
    return;
  }
  for (int64_t k = 0; k < depth; ++k) steps[k] = int16_t(step_of(row, x[k]));
}

inline void quantise_to_bytes(const RowSteps& by, const float* x, int64_t depth, uint8_t* bytes) {
  // A copy: bytes may stand for anything in memory, `by` included, which would forbid vectors.
  const RowSteps row = by;
  for (int64_t k = depth; k < ceil_div(depth, 4) * 4; ++k) bytes[k] = 0;
  if (row.low == row.high) {
    for (int64_t k = 0; k < depth; ++k) bytes[k] = 0;
    return;
  }
  for (int64_t k = 0; k < depth; ++k) bytes[k] = uint8_t(step_of(row, x[k]) - row.low);
}

}  // namespace blockgate::BLOCKGATE_ISA
