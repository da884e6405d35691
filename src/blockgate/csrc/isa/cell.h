// The cells of LSTMs and GRUs, elementwise: nonlinear functions, one step forward and one step back.
#pragma once

#include "isa/vec.h"

namespace blockgate::BLOCKGATE_ISA {

template <class V>
BLOCKGATE_INLINE V clamp(V x, V low, V high) {
  // NaN fails both comparisons and stays.
  x = x < low ? low : x;
  return x > high ? high : x;
}

// e^x for x in [-87, 88], within about an ulp: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
BLOCKGATE_INLINE Vec<float> exponential(Vec<float> x) {
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  constexpr float MAGIC = 12582912.0f;
  x = clamp(x, broadcast(-87.0f), broadcast(88.0f));
  const Vec<float> shifted = multiply_add(x, broadcast(1.44269504f), broadcast(MAGIC));
  const Vec<float> n = shifted - broadcast(MAGIC);
  Vec<float> r = multiply_add(n, broadcast(-0.693359375f), x);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  Vec<float> p = broadcast(1.9875691500e-4f);
  p = multiply_add(p, r, broadcast(1.3981999507e-3f));
  p = multiply_add(p, r, broadcast(8.3334519073e-3f));
  p = multiply_add(p, r, broadcast(4.1665795894e-2f));
  p = multiply_add(p, r, broadcast(1.6666665459e-1f));
  p = multiply_add(p, r, broadcast(5.0000001201e-1f));
  p = multiply_add(p, r * r, r) + broadcast(1.0f);
  // The shift drops all of MAGIC's own bits.
  const Vec<uint32_t> power = ((Vec<uint32_t>)shifted << 23) + broadcast_key<uint32_t>(127u << 23);
  return p * (Vec<float>)power;
}

BLOCKGATE_INLINE Vec<float> sigmoid(Vec<float> x) {
  return broadcast(1.0f) / (broadcast(1.0f) + exponential(-x));
}

BLOCKGATE_INLINE Vec<float> hyperbolic_tangent(Vec<float> x) {
  const Vec<float> size = x < Vec<float>{} ? -x : x;
  const Vec<float> e = exponential(size + size);
  Vec<float> large = broadcast(1.0f) - broadcast(2.0f) / (e + broadcast(1.0f));
  large = x < Vec<float>{} ? -large : large;
  // Near 0 the difference above would cancel.
  const Vec<float> square = x * x;
  Vec<float> p = broadcast(-5.70498872745e-3f);
  p = multiply_add(p, square, broadcast(2.06390887954e-2f));
  p = multiply_add(p, square, broadcast(-5.37397155531e-2f));
  p = multiply_add(p, square, broadcast(1.33314422036e-1f));
  p = multiply_add(p, square, broadcast(-3.33332819422e-1f));
  const Vec<float> small = multiply_add(p * square, x, x);
  return size < broadcast(0.625f) ? small : large;
}

BLOCKGATE_INLINE Vec<double> sigmoid(Vec<double> x) {
  for (int j = 0; j < LANES<double>; ++j) x[j] = 1 / (1 + __builtin_exp(-x[j]));
  return x;
}

BLOCKGATE_INLINE Vec<double> hyperbolic_tangent(Vec<double> x) {
  for (int j = 0; j < LANES<double>; ++j) x[j] = __builtin_tanh(x[j]);
  return x;
}

// The first `count` values; the rest of the vector is 0.
template <class T>
BLOCKGATE_INLINE Vec<T> load_some(const T* p, int64_t count) {
  if (count >= LANES<T>) return load(p);
  T edge[LANES<T>] = {};
  for (int64_t i = 0; i < count; ++i) edge[i] = p[i];
  return load(edge);
}

template <class T>
BLOCKGATE_INLINE void store_some(T* p, Vec<T> v, int64_t count) {
  if (count >= LANES<T>) return store(p, v);
  T edge[LANES<T>];
  store(edge, v);
  for (int64_t i = 0; i < count; ++i) p[i] = edge[i];
}

template <class T>
void add_bias(const T* from, const T* bias, int64_t tokens, int64_t stride, int64_t begin,
              int64_t end, T* to) {
  if (!bias && from == to) return;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = begin; i < end; i += LANES<T>) {
      Vec<T> sum{};
      if (from) sum += load_some(from + t * stride + i, end - i);
      if (bias) sum += load_some(bias + i, end - i);
      store_some(to + t * stride + i, sum, end - i);
    }
}

template <class T>
void lstm_forward(const CellForward<T>& args, int64_t token, int64_t unit_begin, int64_t unit_end) {
  const int64_t size = args.size;
  T* pre = args.activations + token * 4 * size;
  for (int64_t unit = unit_begin; unit < unit_end; unit += LANES<T>) {
    const int64_t n = unit_end - unit, at = token * size + unit;
    const Vec<T> i = sigmoid(load_some(pre + unit, n));
    const Vec<T> f = sigmoid(load_some(pre + size + unit, n));
    const Vec<T> g = hyperbolic_tangent(load_some(pre + 2 * size + unit, n));
    const Vec<T> o = sigmoid(load_some(pre + 3 * size + unit, n));
    const Vec<T> c = multiply_add(f, load_some(args.before + at, n), i * g);
    store_some(pre + unit, i, n);
    store_some(pre + size + unit, f, n);
    store_some(pre + 2 * size + unit, g, n);
    store_some(pre + 3 * size + unit, o, n);
    store_some(args.c + at, c, n);
    store_some(args.h + at, o * hyperbolic_tangent(c), n);
  }
}

template <class T>
void gru_forward(const CellForward<T>& args, int64_t token, int64_t unit_begin, int64_t unit_end) {
  const int64_t size = args.size;
  T* pre = args.activations + token * 3 * size;
  const T* input = args.input + token * 3 * size;
  for (int64_t unit = unit_begin; unit < unit_end; unit += LANES<T>) {
    const int64_t count = unit_end - unit, at = token * size + unit;
    const T *of_r = input + unit, *of_z = of_r + size, *of_n = of_z + size;
    const Vec<T> r = sigmoid(load_some(of_r, count) + load_some(pre + unit, count));
    const Vec<T> z = sigmoid(load_some(of_z, count) + load_some(pre + size + unit, count));
    const Vec<T> state = load_some(pre + 2 * size + unit, count);
    const Vec<T> n = hyperbolic_tangent(multiply_add(r, state, load_some(of_n, count)));
    store_some(pre + unit, r, count);
    store_some(pre + size + unit, z, count);
    store_some(pre + 2 * size + unit, n, count);
    if (args.c) store_some(args.c + at, state, count);
    store_some(args.h + at, multiply_add(z, load_some(args.before + at, count) - n, n), count);
  }
}

template <class T>
void cell_forward(const CellForward<T>& args, int64_t token, int64_t unit_begin, int64_t unit_end) {
  if (args.cell == Cell::lstm) lstm_forward(args, token, unit_begin, unit_end);
  else gru_forward(args, token, unit_begin, unit_end);
}

template <class T>
void lstm_backward(const CellBackward<T>& args, int64_t token) {
  const Vec<T> one = broadcast(T(1));
  const int64_t size = args.size;
  const T* activations = args.activations + token * 4 * size;
  T* grad_sums = args.grad_sums + token * 4 * size;
  for (int64_t unit = 0; unit < size; unit += LANES<T>) {
    const int64_t n = size - unit, at = token * size + unit;
    const Vec<T> i = load_some(activations + unit, n);
    const Vec<T> f = load_some(activations + size + unit, n);
    const Vec<T> g = load_some(activations + 2 * size + unit, n);
    const Vec<T> o = load_some(activations + 3 * size + unit, n);
    const Vec<T> tanh_c = hyperbolic_tangent(load_some(args.c + at, n));
    Vec<T> grad_h = load_some(args.grad_h + at, n);
    if (args.grad_output) grad_h += load_some(args.grad_output + at, n);
    const Vec<T> grad_c =
        multiply_add(grad_h * o, one - tanh_c * tanh_c, load_some(args.grad_carry + at, n));
    store_some(grad_sums + unit, grad_c * g * i * (one - i), n);
    store_some(grad_sums + size + unit, grad_c * load_some(args.before + at, n) * f * (one - f), n);
    store_some(grad_sums + 2 * size + unit, grad_c * i * (one - g * g), n);
    store_some(grad_sums + 3 * size + unit, grad_h * tanh_c * o * (one - o), n);
    store_some(args.grad_carry + at, grad_c * f, n);
  }
}

template <class T>
void gru_backward(const CellBackward<T>& args, int64_t token) {
  const Vec<T> one = broadcast(T(1));
  const int64_t size = args.size;
  const T* activations = args.activations + token * 3 * size;
  T* grad_sums = args.grad_sums + token * 3 * size;
  T* grad_input = args.grad_input + token * 3 * size;
  for (int64_t unit = 0; unit < size; unit += LANES<T>) {
    const int64_t count = size - unit, at = token * size + unit;
    const Vec<T> r = load_some(activations + unit, count);
    const Vec<T> z = load_some(activations + size + unit, count);
    const Vec<T> n = load_some(activations + 2 * size + unit, count);
    Vec<T> grad_h = load_some(args.grad_h + at, count) + load_some(args.grad_carry + at, count);
    if (args.grad_output) grad_h += load_some(args.grad_output + at, count);
    const Vec<T> grad_n = grad_h * (one - z) * (one - n * n);
    const Vec<T> grad_r = grad_n * load_some(args.c + at, count) * r * (one - r);
    const Vec<T> grad_z = grad_h * (load_some(args.before + at, count) - n) * z * (one - z);
    store_some(grad_input + unit, grad_r, count);
    store_some(grad_input + size + unit, grad_z, count);
    store_some(grad_input + 2 * size + unit, grad_n, count);
    store_some(grad_sums + unit, grad_r, count);
    store_some(grad_sums + size + unit, grad_z, count);
    store_some(grad_sums + 2 * size + unit, grad_n * r, count);
    store_some(args.grad_carry + at, grad_h * z, count);
  }
}

template <class T>
void cell_backward(const CellBackward<T>& args, int64_t token) {
  if (args.cell == Cell::lstm) lstm_backward(args, token);
  else gru_backward(args, token);
}

}  // namespace blockgate::BLOCKGATE_ISA
