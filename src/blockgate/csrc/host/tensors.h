// Tensors at the op boundary: checks that say what was expected and what came, and plain views.
#pragma once

#include "kernels.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <limits>
#include <optional>
#include <string>

// Hidden, as torch's own stable types are.
namespace blockgate __attribute__((visibility("hidden"))) {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
inline constexpr ScalarType SCALAR_TYPE = ScalarType::Float;
template <>
inline constexpr ScalarType SCALAR_TYPE<double> = ScalarType::Double;
template <>
inline constexpr ScalarType SCALAR_TYPE<int64_t> = ScalarType::Long;

inline std::string shape_text(const Tensor& t) {
  std::string text = "(";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + ")";
}

inline void check_tensor(const Tensor& t, const char* name, ScalarType type, int64_t dim) {
  STD_TORCH_CHECK(t.is_cpu(), name, ": expected a CPU tensor, got another device");
  STD_TORCH_CHECK(t.scalar_type() == type, name, ": expected dtype ",
                  torch::headeronly::toString(type), ", got ",
                  torch::headeronly::toString(t.scalar_type()));
  STD_TORCH_CHECK(t.dim() == dim, name, ": expected ", dim, " dimensions, got shape ",
                  shape_text(t));
}

inline void check_size(const Tensor& t, const char* name, int64_t dim, int64_t expected) {
  STD_TORCH_CHECK(t.size(dim) == expected, name, ": expected size ", expected, " in dimension ",
                  dim, ", got shape ", shape_text(t));
}

// A matrix whose rows are contiguous, whatever their distance. Keeps its tensor alive.
template <class T>
struct Rows {
  Tensor tensor;
  const T* data;
  int64_t count, width, stride;
};

template <class T>
Rows<T> rows_of(const Tensor& t, const char* name) {
  check_tensor(t, name, SCALAR_TYPE<T>, 2);
  const bool rows_contiguous = t.size(1) <= 1 || t.stride(1) == 1;
  Tensor kept = rows_contiguous ? t : torch::stable::contiguous(t);
  STD_TORCH_CHECK(kept.size(0) <= std::numeric_limits<int32_t>::max(), name,
                  ": expected fewer than 2^31 rows, got ", kept.size(0));
  return {kept, static_cast<const T*>(kept.const_data_ptr()), kept.size(0), kept.size(1),
          kept.stride(0)};
}

// A tensor in plain row-major order.
template <class T>
struct Dense {
  Tensor tensor;
  const T* data;
};

template <class T>
Dense<T> dense_of(const Tensor& t, const char* name, int64_t dim) {
  check_tensor(t, name, SCALAR_TYPE<T>, dim);
  Tensor kept = t.is_contiguous() ? t : torch::stable::contiguous(t);
  return {kept, static_cast<const T*>(kept.const_data_ptr())};
}

// data is null if there is no bias.
template <class T>
Dense<T> bias_of(const std::optional<Tensor>& bias, const char* name, int64_t size,
                 const Tensor& placeholder) {
  if (!bias) return {placeholder, nullptr};
  Dense<T> view = dense_of<T>(*bias, name, 1);
  check_size(*bias, name, 0, size);
  return view;
}

inline void check_numel(const Tensor& t, const char* name, int64_t expected) {
  STD_TORCH_CHECK(t.numel() == expected, name, ": expected ", expected, " values, got ", t.numel());
}

// A bias that is kept for many calls, and read anew in each: see PackedWeight::view.
struct KeptBias {
  std::optional<Tensor> tensor;
  int64_t size;

  const float* data() const {
    if (!tensor) return nullptr;
    check_numel(*tensor, "bias", size);
    return static_cast<const float*>(tensor->const_data_ptr());
  }
};

inline KeptBias kept_bias_of(const std::optional<Tensor>& bias, const char* name, int64_t size,
                             const Tensor& placeholder) {
  if (!bias) return {std::nullopt, size};
  return {bias_of<float>(bias, name, size, placeholder).tensor, size};
}

// Gates and indices of a batch, checked against each other and the batch.
template <class T>
struct Gates {
  Dense<T> gates;
  Dense<int64_t> indices;
  int64_t slots;
};

template <class T>
Gates<T> gates_of(const Tensor& gates, const Tensor& indices, int64_t tokens) {
  Gates<T> view{dense_of<T>(gates, "gates", 2), dense_of<int64_t>(indices, "indices", 2),
                gates.size(1)};
  check_size(gates, "gates", 0, tokens);
  check_size(indices, "indices", 0, tokens);
  check_size(indices, "indices", 1, view.slots);
  return view;
}

inline int32_t shim_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Double: return aoti_torch_dtype_float64();
    case ScalarType::Long: return aoti_torch_dtype_int64();
    case ScalarType::Half: return aoti_torch_dtype_float16();
    case ScalarType::BFloat16: return aoti_torch_dtype_bfloat16();
    case ScalarType::Char: return aoti_torch_dtype_int8();
    case ScalarType::Byte: return aoti_torch_dtype_uint8();
    default: return aoti_torch_dtype_float32();
  }
}

// A large result is fresh memory: faulting it in by pages of 4 KB can take as long as computing it.
inline void ask_for_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  constexpr size_t HUGE_PAGE = size_t(2) << 20;
  if (bytes < 4 * HUGE_PAGE) return;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / HUGE_PAGE * HUGE_PAGE;
  // Only a hint: where it is refused, nothing is lost.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// An uninitialised contiguous CPU tensor, by the shim's direct call: the dispatcher's way costs
// as much as a whole small layer.
template <int DIM>
Tensor empty_tensor(const int64_t (&sizes)[DIM], ScalarType type) {
  int64_t strides[DIM];
  int64_t stride = 1;
  for (int i = DIM - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(DIM, sizes, strides, shim_dtype(type),
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  Tensor result(handle);
  ask_for_huge_pages(result.mutable_data_ptr(), result.numel() * result.element_size());
  return result;
}

template <class T>
T* data_of(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

inline Grid make_grid(int64_t out, int64_t in, int64_t block_out, int64_t block_in) {
  STD_TORCH_CHECK(out > 0 && in > 0, "expected a weight with at least one row and column, got (",
                  out, ", ", in, ")");
  STD_TORCH_CHECK(block_out > 0 && block_in > 0, "expected block sizes of at least 1, got (",
                  block_out, ", ", block_in, ")");
  // As in grid.py: sums and products of sizes then stay in 64 bits.
  constexpr int64_t MOST = int64_t(1) << 40;
  STD_TORCH_CHECK(out <= MOST && in <= MOST && block_out <= MOST && block_in <= MOST,
                  "expected sizes of at most 2^40, got a weight (", out, ", ", in,
                  ") in blocks of (", block_out, ", ", block_in, ")");
  const Grid grid{out, in, block_out, block_in, ceil_div(out, block_out), ceil_div(in, block_in)};
  STD_TORCH_CHECK(grid.rows <= std::numeric_limits<int32_t>::max() / grid.cols,
                  "expected fewer than 2^31 blocks, got ", grid.rows, " x ", grid.cols);
  return grid;
}

// Calls body with a value of the tensor's type, float or double.
template <class Body>
auto with_float_type(const Tensor& t, const char* name, const Body& body) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double, name,
                  ": expected dtype Float or Double, got ", torch::headeronly::toString(type));
  return type == ScalarType::Double ? body(double{}) : body(float{});
}

}  // namespace blockgate
