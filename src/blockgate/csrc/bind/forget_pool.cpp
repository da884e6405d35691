// The recurrence of the Quasi-RNN: c_t = f_t * c_{t-1} + (1 - f_t) * z_t, forward and backward.
//
// Every state is independent of its neighbours, so threads share out the N * H states and walk
// through time. Plain loops: reading memory is what takes the time.
#include "host/parallel.h"
#include "host/tensors.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

namespace blockgate {
namespace {

// States that one task walks through time: a few cache lines, so that rows of memory stay open.
constexpr int64_t STATES_PER_TASK = 1024;

struct PoolShape {
  int64_t steps, rows, width;
  int64_t states() const { return rows * width; }
};

PoolShape shape_of(const Tensor& candidate, const Tensor& initial) {
  const PoolShape shape{candidate.size(0), candidate.size(1), candidate.size(2)};
  check_size(initial, "initial", 0, shape.rows);
  check_size(initial, "initial", 1, shape.width);
  return shape;
}

void check_like(const Tensor& t, const char* name, const PoolShape& shape) {
  check_size(t, name, 0, shape.steps);
  check_size(t, name, 1, shape.rows);
  check_size(t, name, 2, shape.width);
}

template <class Walk>
void for_state_ranges(const PoolShape& shape, const Walk& walk) {
  const int64_t states = shape.states();
  run_tasks(ceil_div(states, STATES_PER_TASK), threads_for(shape.steps * states * 4),
            [&](int64_t task) {
              const int64_t begin = task * STATES_PER_TASK;
              walk(begin, smaller(begin + STATES_PER_TASK, states));
            });
}

template <class T>
Tensor pool(const Tensor& candidate, const Tensor& forget, const Tensor& initial) {
  const Dense<T> z = dense_of<T>(candidate, "candidate", 3), f = dense_of<T>(forget, "forget", 3);
  const Dense<T> c0 = dense_of<T>(initial, "initial", 2);
  const PoolShape shape = shape_of(candidate, initial);
  check_like(forget, "forget", shape);
  const Tensor result = empty_tensor({shape.steps, shape.rows, shape.width}, SCALAR_TYPE<T>);
  T* states = data_of<T>(result);
  for_state_ranges(shape, [&](int64_t begin, int64_t end) {
    const T* before = c0.data;
    for (int64_t t = 0; t < shape.steps; ++t) {
      const T* zt = z.data + t * shape.states();
      const T* ft = f.data + t * shape.states();
      T* ct = states + t * shape.states();
      for (int64_t i = begin; i < end; ++i) ct[i] = ft[i] * before[i] + (1 - ft[i]) * zt[i];
      before = ct;
    }
  });
  return result;
}

template <class T>
std::tuple<Tensor, Tensor, Tensor> pool_backward(const Tensor& grad_states, const Tensor& candidate,
                                                 const Tensor& forget, const Tensor& initial,
                                                 const Tensor& states) {
  const Dense<T> g = dense_of<T>(grad_states, "grad_states", 3);
  const Dense<T> z = dense_of<T>(candidate, "candidate", 3), f = dense_of<T>(forget, "forget", 3);
  const Dense<T> c0 = dense_of<T>(initial, "initial", 2), c = dense_of<T>(states, "states", 3);
  const PoolShape shape = shape_of(candidate, initial);
  check_like(grad_states, "grad_states", shape);
  check_like(forget, "forget", shape);
  check_like(states, "states", shape);
  const Tensor grad_z = empty_tensor({shape.steps, shape.rows, shape.width}, SCALAR_TYPE<T>);
  const Tensor grad_f = empty_tensor({shape.steps, shape.rows, shape.width}, SCALAR_TYPE<T>);
  const Tensor grad_c0 = empty_tensor({shape.rows, shape.width}, SCALAR_TYPE<T>);
  T *gz = data_of<T>(grad_z), *gf = data_of<T>(grad_f), *carried = data_of<T>(grad_c0);
  for_state_ranges(shape, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) carried[i] = 0;
    for (int64_t t = shape.steps - 1; t >= 0; --t) {
      const int64_t at = t * shape.states();
      const T* before = t ? c.data + at - shape.states() : c0.data;
      for (int64_t i = begin; i < end; ++i) {
        const T grad = carried[i] + g.data[at + i];
        const T forgotten = f.data[at + i];
        gz[at + i] = grad * (1 - forgotten);
        gf[at + i] = grad * (before[i] - z.data[at + i]);
        carried[i] = grad * forgotten;
      }
    }
  });
  return {grad_z, grad_f, grad_c0};
}

Tensor forget_pool(const Tensor& candidate, const Tensor& forget, const Tensor& initial) {
  return with_float_type(candidate, "candidate", [&](auto zero) {
    return pool<decltype(zero)>(candidate, forget, initial);
  });
}

std::tuple<Tensor, Tensor, Tensor> forget_pool_backward(const Tensor& grad_states,
                                                        const Tensor& candidate,
                                                        const Tensor& forget,
                                                        const Tensor& initial,
                                                        const Tensor& states) {
  return with_float_type(candidate, "candidate", [&](auto zero) {
    return pool_backward<decltype(zero)>(grad_states, candidate, forget, initial, states);
  });
}

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("forget_pool", TORCH_BOX(&blockgate::forget_pool));
  m.impl("forget_pool_backward", TORCH_BOX(&blockgate::forget_pool_backward));
}
