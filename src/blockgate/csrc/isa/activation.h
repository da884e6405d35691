// The activations of MLPs, elementwise.
#pragma once

#include "isa/cell.h"

namespace blockgate::BLOCKGATE_ISA {

// x times the normal distribution function. Of 1 - erf(z), z = |x| / sqrt 2, Abramowitz and Stegun, 7.1.26, is within
// 1.5e-7; the tail is made as it is, not as a difference.
BLOCKGATE_INLINE Vec<float> gelu(Vec<float> x) {
  const Vec<float> size = x < Vec<float>{} ? -x : x, z = size * broadcast(0.70710678f);
  const Vec<float> t = broadcast(1.0f) / multiply_add(z, broadcast(0.3275911f), broadcast(1.0f));
  Vec<float> p = broadcast(1.061405429f);
  p = multiply_add(p, t, broadcast(-1.453152027f));
  p = multiply_add(p, t, broadcast(1.421413741f));
  p = multiply_add(p, t, broadcast(-0.284496736f));
  p = multiply_add(p, t, broadcast(0.254829592f));
  const Vec<float> tail = broadcast(0.5f) * p * t * exponential(-z * z);
  return x * (x < Vec<float>{} ? tail : broadcast(1.0f) - tail);
}

BLOCKGATE_INLINE Vec<float> gelu_tanh(Vec<float> x) {
  const Vec<float> cubed = multiply_add(x * x * x, broadcast(0.044715f), x);
  return broadcast(0.5f) * x * (broadcast(1.0f) + hyperbolic_tangent(broadcast(0.79788456f) * cubed));
}

// NaN stays.
BLOCKGATE_INLINE Vec<float> relu(Vec<float> x) { return x <= Vec<float>{} ? Vec<float>{} : x; }

BLOCKGATE_INLINE Vec<float> silu(Vec<float> x) { return x / (broadcast(1.0f) + exponential(-x)); }

inline void activate(Activation kind, const float* factor, int64_t count, float* hidden) {
  const auto each = [&](const auto& function) __attribute__((always_inline)) {
    for (int64_t i = 0; i < count; i += LANES<float>) {
      Vec<float> y = function(load_some(hidden + i, count - i));
      if (factor) y *= load_some(factor + i, count - i);
      store_some(hidden + i, y, count - i);
    }
  };
  switch (kind) {
    case Activation::gelu: return each([](Vec<float> x) __attribute__((always_inline)) { return gelu(x); });
    case Activation::gelu_tanh: return each([](Vec<float> x) __attribute__((always_inline)) { return gelu_tanh(x); });
    case Activation::relu: return each([](Vec<float> x) __attribute__((always_inline)) { return relu(x); });
    case Activation::silu: return each([](Vec<float> x) __attribute__((always_inline)) { return silu(x); });
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
