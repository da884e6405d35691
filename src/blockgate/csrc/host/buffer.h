// Scratch memory, uninitialised and aligned to a cache line.
//
// Some freed buffers are kept for the next call, since fresh pages cost more to fault in than much of what
// is computed in them: small ones by each thread, up to 1 MB, large ones by the process, up to 64 MB.
#pragma once

#include <cstddef>
#include <cstdint>

namespace blockgate {

// Throws std::bad_alloc where there is none, or nobody can have so much.
void* take_memory(int64_t count, size_t size, size_t* capacity);
void give_memory(void* memory, size_t capacity) noexcept;

// Makes the `which`-th request from now on fail, as if memory were short, once; 0: none. For tests, which
// let every request fail in its turn. Returns how many requests came since the last call.
int64_t fail_request(int64_t which);

// Bytes of large buffers that are kept now. For tests.
size_t kept_memory();

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(take_memory(count, sizeof(T), &capacity_))) {}
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
