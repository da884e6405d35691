// The output layer, screened: bounds of all scores from codes of 4 bits, and exact scores of single rows.
//
// A row w is q + e: what its codes hold, and what they miss. The scan computes q x' for inputs x' rounded
// to bytes; w x differs from it by e x + q (x - x'), which by Cauchy-Schwarz is at most
// |e| |x| + |q| |x - x'|. Integer sums of a group are exact, and so are their
// products with its step; the roundings of all the rest have their place in ScreenSlack.
#pragma once

#include "isa/vec.h"

namespace blockgate::BLOCKGATE_ISA {

// Codes are 0 to 15 and stand for -8 to 7.
inline constexpr int32_t SCREEN_ZERO = 8;
inline constexpr int32_t SCREEN_LARGEST_STEP = 127;

inline ScreenNorms screen_input(const float* x, int64_t depth, const ScreenInput& to) {
  ScreenNorms norms{0, 0, true};
  for (int64_t begin = 0; begin < depth; begin += SCREEN_GROUP) {
    const int64_t group = begin / SCREEN_GROUP;
    float in[SCREEN_GROUP] = {};
    __builtin_memcpy(in, x + begin, smaller(SCREEN_GROUP, depth - begin) * sizeof(float));
    // As integers, bits without the sign sort like the numbers, NaN and inf last.
    int32_t largest_bits = 0;
    for (int64_t k = 0; k < SCREEN_GROUP; ++k) {
      int32_t bits;
      __builtin_memcpy(&bits, in + k, sizeof bits);
      bits &= 0x7fffffff;
      largest_bits = largest_bits < bits ? bits : largest_bits;
    }
    if (largest_bits >= 0x7f800000) return {0, 0, false};
    float largest;
    __builtin_memcpy(&largest, &largest_bits, sizeof largest);
    constexpr float SMALLEST_NORMAL = 0x1p-126f;
    float size = largest / SCREEN_LARGEST_STEP;
    if (size < SMALLEST_NORMAL) size = SMALLEST_NORMAL;
    to.sizes[group] = size;
    // Adding 1.5 * 2^23 leaves no bits below one: the addition itself rounds to nearest even.
    constexpr float ROUNDER = 0x1.8p23f;
    float steps[SCREEN_GROUP];
    for (int64_t k = 0; k < SCREEN_GROUP; ++k) steps[k] = (in[k] / size + ROUNDER) - ROUNDER;
    int8_t* bytes = to.steps + begin;
    for (int64_t k = 0; k < SCREEN_GROUP; ++k) bytes[k] = int8_t(int32_t(steps[k]));
    double square = 0, missed = 0;
    for (int64_t k = 0; k < SCREEN_GROUP; ++k) {
      const double value = in[k], difference = value - double(steps[k]) * double(size);
      square += value * value;
      missed += difference * difference;
    }
    norms.input += square;
    norms.missed += missed;
    int32_t halves[2] = {};
    for (int64_t k = 0; k < SCREEN_GROUP; ++k) halves[k / 2 % 2] -= SCREEN_ZERO * int32_t(bytes[k]);
    to.offsets[group] = int32_t(uint32_t(halves[0]) & 0xffff) | int32_t(uint32_t(halves[1]) << 16);
    const int64_t padded = ceil_div(depth, EXACT_LANES) * EXACT_LANES;
    for (int64_t k = 0; k < smaller(SCREEN_GROUP, padded - begin); ++k) to.exact[begin + k] = in[k];
  }
  norms.input = __builtin_sqrt(norms.input);
  norms.missed = __builtin_sqrt(norms.missed);
  return norms;
}

// Bytes ahead of what is read.
inline constexpr int64_t SCREEN_AHEAD = 1024;

BLOCKGATE_INLINE void screen_panel(const ScreenRows& rows, const ScreenInput& x,
                                   const ScreenSlack& slack, int64_t panel,
                                   const ScreenBounds& to) {
  constexpr int VECTORS = PANEL_VECTORS<float>, BYTES = BLOCKGATE_VECTOR_BYTES;
  const uint8_t* codes = rows.codes + panel * rows.groups * SCREEN_GROUP * PANEL / 2;
  const uint8_t* steps = rows.steps + panel * rows.groups * PANEL;
  const Vec<uint8_t> low_bits = Vec<uint8_t>{} + 15;
  Vec<float> sums[VECTORS] = {};
  for (int64_t group = 0; group < rows.groups; ++group, steps += PANEL) {
    Vec<int16_t> part[VECTORS];
    const auto offset = (Vec<int16_t>)(Vec<int32_t>{} + x.offsets[group]);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) part[v] = offset;
    const int8_t* inputs = x.steps + group * SCREEN_GROUP;
#pragma GCC unroll 4
    for (int j = 0; j < SCREEN_GROUP / 8; ++j, inputs += 8) {
      int32_t first, second;
      __builtin_memcpy(&first, inputs, 4);
      __builtin_memcpy(&second, inputs + 4, 4);
      const auto x_low = (Vec<int8_t>)(Vec<int32_t>{} + first);
      const auto x_high = (Vec<int8_t>)(Vec<int32_t>{} + second);
      __builtin_prefetch(codes + SCREEN_AHEAD);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v, codes += BYTES) {
        const Vec<uint8_t> both = load(codes);
        const auto high = (Vec<uint8_t>)((Vec<uint16_t>)both >> 4) & low_bits;
        part[v] += multiply_bytes(both & low_bits, x_low);
        part[v] += multiply_bytes(high, x_high);
      }
    }
    PanelLanes step;
    widen(steps, step);
    const Vec<float> size = Vec<float>{} + x.sizes[group];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const auto pair = (Vec<int16_t>)(step[v] | step[v] << 16);
      const Vec<int32_t> whole = add_pairs(Vec<int32_t>{}, part[v], pair);
      sums[v] = multiply_add(__builtin_convertvector(whole, Vec<float>), size, sums[v]);
    }
  }

  const float* row = rows.rows + panel * SCREEN_ROW_VALUES * PANEL;
  const Vec<float> none{}, infinite = none + __builtin_inff();
  Vec<float> most_lower = -infinite, most_upper = -infinite;
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; ++v) {
    const int at = v * LANES<float>;
    const Vec<float> unit = load(row + at), missed = load(row + PANEL + at),
                     held = load(row + 2 * PANEL + at), bias = load(row + 3 * PANEL + at);
    const Vec<float> score = sums[v] * unit + bias;
    const Vec<float> size = score < none ? -score : score;
    const Vec<float> bias_size = bias < none ? -bias : bias;
    const Vec<float> error = missed * slack.missed + held * slack.held + bias_size * slack.bias +
                             slack.rest;
    // Nothing is known of what may overflow, and of NaN.
    const Vec<int32_t> known = (size < none + SCREEN_LARGEST) & (error < none + SCREEN_LARGEST);
    const Vec<float> lower = known ? score - error : -infinite;
    const Vec<float> upper = known ? score + error : infinite;
    store(to.lower + panel * PANEL + at, lower);
    store(to.upper + panel * PANEL + at, upper);
    most_lower = lower > most_lower ? lower : most_lower;
    most_upper = upper > most_upper ? upper : most_upper;
  }
  float largest_lower = most_lower[0], largest_upper = most_upper[0];
  for (int i = 1; i < LANES<float>; ++i) {
    if (most_lower[i] > largest_lower) largest_lower = most_lower[i];
    if (most_upper[i] > largest_upper) largest_upper = most_upper[i];
  }
  to.panel_lower[panel] = largest_lower;
  to.panel_upper[panel] = largest_upper;
}

inline void screen(const ScreenRows& rows, const ScreenInput& x, const ScreenSlack& slack,
                   int64_t begin, int64_t end, const ScreenBounds& to) {
  for (int64_t panel = begin; panel < end; ++panel) screen_panel(rows, x, slack, panel, to);
}

// Products of floats are exact in double: fused or not, the sum has the same bits on every machine.
inline float exact_score(const float* row, int64_t depth, const double* x, float bias,
                         const float* next) {
  constexpr int L = LANES<double>, VECTORS = int(EXACT_LANES) / L;
  Vec<double> sums[VECTORS] = {};
  int64_t k = 0;
  for (; k + EXACT_LANES <= depth; k += EXACT_LANES) {
    if (next) __builtin_prefetch(next + k);
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      Part<float, L> weight;
      __builtin_memcpy(&weight, row + k + v * L, sizeof weight);
      sums[v] = multiply_add(__builtin_convertvector(weight, Vec<double>), load(x + k + v * L),
                             sums[v]);
    }
  }
  double lanes[EXACT_LANES];
  for (int v = 0; v < VECTORS; ++v) store(lanes + v * L, sums[v]);
  for (int64_t i = 0; k + i < depth; ++i) lanes[i] = multiply_add(double(row[k + i]), x[k + i], lanes[i]);
  for (int64_t half = EXACT_LANES / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return float(lanes[0] + double(bias));
}

}  // namespace blockgate::BLOCKGATE_ISA
