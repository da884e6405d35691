// The gradients of x and of the gates for blocks of fewer than 16 inputs.
//
// A vector of weights holds a few inputs, each with a group of neighbouring outputs. The outputs of a
// group are chains of their own, added in a fixed tree at the end, so no lane is padding and a sum
// never depends on the tile.
#pragma once

#include "isa/forward.h"

#include <utility>

namespace blockgate::BLOCKGATE_ISA {

// One block seen by grad_x and grad_gates.
template <class T>
struct InputGradJob {
  const T* grad_y;  // at the block's first output
  int64_t grad_y_stride;
  const T* panels;  // see StepInputGrad
  int64_t outputs, inputs;
  const T* x;  // at the block's first input, as grad_x
  int64_t x_stride;
  T* grad_x;
  int64_t grad_x_stride;
  T* grad_gates;
  int64_t slots;
  const Entry<T>* entries;
  int64_t count;
};

// COUNT values side by side in memory, repeated to fill a vector; no more than fit into it.
template <int COUNT, class T>
BLOCKGATE_INLINE Vec<T> load_repeated(const T* p) {
  constexpr int BYTES = COUNT * sizeof(T);
  if constexpr (COUNT == 1) {
    return broadcast(*p);
  } else if constexpr (BYTES >= BLOCKGATE_VECTOR_BYTES) {
    return load(p);
  } else if constexpr (BYTES == sizeof(int64_t)) {
    int64_t both;
    __builtin_memcpy(&both, p, sizeof both);
    return (Vec<T>)broadcast_key(both);
  } else {
    return (Vec<T>)repeat<BYTES>(p);
  }
}

template <int DISTANCE, class T, int... I>
BLOCKGATE_INLINE Vec<T> exchange_lanes(Vec<T> v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, (I ^ DISTANCE)...);
}

template <int STEP, class T, int... I>
BLOCKGATE_INLINE Part<T, int(sizeof...(I))> every_lane(Vec<T> v, std::integer_sequence<int, I...>) {
  if constexpr (sizeof...(I) == 1) return v[0];
  else return __builtin_shufflevector(v, v, (I * STEP)...);
}

// The sums of every GROUP neighbouring lanes.
template <int GROUP, class T>
BLOCKGATE_INLINE Part<T, LANES<T> / GROUP> sum_groups(Vec<T> v) {
  constexpr std::make_integer_sequence<int, LANES<T>> lanes;
  if constexpr (GROUP > 1) v += exchange_lanes<1, T>(v, lanes);
  if constexpr (GROUP > 2) v += exchange_lanes<2, T>(v, lanes);
  if constexpr (GROUP > 4) v += exchange_lanes<4, T>(v, lanes);
  if constexpr (GROUP > 8) v += exchange_lanes<8, T>(v, lanes);
  return every_lane<GROUP, T>(v, std::make_integer_sequence<int, LANES<T> / GROUP>());
}

template <int COUNT, class T>
BLOCKGATE_INLINE T sum_part(Part<T, COUNT> part) {
  if constexpr (COUNT == 1) {
    return part;
  } else {
    T sum = part[0];
#pragma GCC unroll 8
    for (int i = 1; i < COUNT; ++i) sum += part[i];
    return sum;
  }
}

// Some tokens of a block that is one panel of WIDTH inputs.
template <int WIDTH, int ROWS, class T>
BLOCKGATE_INLINE void thin_input_grad_tile(const InputGradJob<T>& job, const Entry<T>* entries) {
  constexpr int VECTORS = PANEL_VECTORS<T>, L = LANES<T>, OUTPUTS = PANEL / WIDTH;
  // Outputs of a group in one vector, vectors that share an input, and inputs in one vector.
  constexpr int GROUP = OUTPUTS < L ? OUTPUTS : L, SHARED = OUTPUTS / GROUP, INPUTS = L / GROUP;
  const T* rows[ROWS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) rows[m] = job.grad_y + entries[m].token * job.grad_y_stride;
  if (entries + 2 * ROWS <= job.entries + job.count) {
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const int64_t token = entries[ROWS + m].token;
      __builtin_prefetch(job.grad_y + token * job.grad_y_stride);
      __builtin_prefetch(job.x + token * job.x_stride);
    }
  }
  // Groups of outputs take turns between two chains where registers allow it: few tokens open a
  // block at one step of a recurrence, and one chain each would wait for itself.
  constexpr int CHAINS = 2 * MAX_ROWS<T> * VECTORS <= BLOCKGATE_ACCUMULATORS ? 2 : 1;
  Tile<T, ROWS, CHAINS> tile;
  tile_clear(tile);
  const auto step = [&](int m, int chain, const T* grad_y, const T* weights)
                        __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      Vec<T>& acc = tile.acc[m][chain * VECTORS + v];
      acc = multiply_add(load_repeated<GROUP>(grad_y + v % SHARED * L), load(weights + v * L), acc);
    }
  };
  const T* weights = job.panels;
  int64_t output = 0;
  for (; output + CHAINS * OUTPUTS <= job.outputs; output += CHAINS * OUTPUTS)
#pragma GCC unroll 2
    for (int chain = 0; chain < CHAINS; ++chain, weights += PANEL)
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) step(m, chain, rows[m] + output + chain * OUTPUTS, weights);
  if (output + OUTPUTS <= job.outputs) {
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) step(m, 0, rows[m] + output, weights);
    output += OUTPUTS;
    weights += PANEL;
  }
  if (output < job.outputs) {
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      T edge[OUTPUTS] = {};
      for (int64_t o = output; o < job.outputs; ++o) edge[o - output] = rows[m][o];
      step(m, 0, edge, weights);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) {
    if constexpr (CHAINS == 2) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) tile.acc[m][v] += tile.acc[m][VECTORS + v];
    }
    using Inputs = Part<T, INPUTS>;
    const T* x = job.x + entries[m].token * job.x_stride;
    T* grad_x = job.grad_x ? job.grad_x + entries[m].token * job.grad_x_stride : nullptr;
    T x_edge[WIDTH], grad_edge[WIDTH];
    const bool ragged = job.inputs < WIDTH;
    if (ragged)
      for (int64_t i = 0; i < WIDTH; ++i) x_edge[i] = i < job.inputs ? x[i] : T(0);
    Inputs products = {};
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v += SHARED) {
      Vec<T> sum = tile.acc[m][v];
#pragma GCC unroll 8
      for (int s = 1; s < SHARED; ++s) sum += tile.acc[m][v + s];
      const Inputs acc = sum_groups<GROUP, T>(sum);
      const int first = v / SHARED * INPUTS;
      Inputs value;
      __builtin_memcpy(&value, (ragged ? x_edge : x) + first, sizeof value);
      products = multiply_add(value, acc, products);
      if (!grad_x) continue;
      if (ragged) {
        __builtin_memcpy(grad_edge + first, &acc, sizeof acc);
      } else {
        Inputs grad;
        __builtin_memcpy(&grad, grad_x + first, sizeof grad);
        grad = multiply_add(entries[m].gate - Inputs{}, acc, grad);
        __builtin_memcpy(grad_x + first, &grad, sizeof grad);
      }
    }
    if (grad_x && ragged)
      for (int64_t i = 0; i < job.inputs; ++i)
        grad_x[i] = multiply_add(entries[m].gate, grad_edge[i], grad_x[i]);
    if (job.grad_gates)
      job.grad_gates[entries[m].token * job.slots + entries[m].slot] = sum_part<INPUTS, T>(products);
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
