// Scratch memory, uninitialised and aligned to a cache line.
//
// Each thread keeps a few freed buffers, up to a fixed total, for the next call: fresh pages cost
// more to fault in than much of what is computed in them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace blockgate {

void* take_memory(size_t bytes, size_t* capacity);
void give_memory(void* memory, size_t capacity) noexcept;

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(take_memory(size_t(count) * sizeof(T), &capacity_))) {}
  Buffer(Buffer&& other) noexcept : capacity_(other.capacity_), data_(other.data_) {
    other.data_ = nullptr;
  }
  Buffer& operator=(Buffer&& other) noexcept {
    T* data = other.data_;
    const size_t capacity = other.capacity_;
    other.data_ = data_;
    other.capacity_ = capacity_;
    data_ = data;
    capacity_ = capacity;
    return *this;
  }
  ~Buffer() {
    if (data_) give_memory(data_, capacity_);
  }
  T* get() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  // Before `data_`, whose initialisation sets it.
  size_t capacity_ = 0;
  T* data_ = nullptr;
};

}  // namespace blockgate
