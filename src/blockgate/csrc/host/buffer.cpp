#include "host/buffer.h"

#include <cstdint>
#include <cstdlib>
#include <new>

namespace blockgate {
namespace {

constexpr size_t KEPT_BYTES = size_t(64) << 20;
constexpr int KEPT_BUFFERS = 12;

struct Kept {
  void* memory;
  size_t capacity;
  uint64_t given;
};

// Set when the thread's pool is gone, so that buffers freed later in its exit go to the system.
thread_local bool pool_closed = false;

struct Pool {
  Kept kept[KEPT_BUFFERS] = {};
  size_t total = 0;
  uint64_t clock = 0;
  ~Pool() {
    pool_closed = true;
    for (Kept& k : kept) std::free(k.memory);
  }
};

Pool& pool() {
  thread_local Pool instance;
  return instance;
}

// Rounded up to one of four sizes between a power of two and the next. Groups of rows differ a little
// in size from call to call; buffers of ever new sizes would leave the heap full of holes.
size_t size_class(size_t bytes) {
  size_t step = 64;
  while (8 * step < bytes) step *= 2;
  return (bytes + step) / step * step;
}

}  // namespace

void* take_memory(size_t bytes, size_t* capacity) {
  const size_t wanted = size_class(bytes);
  if (!pool_closed) {
    Kept* best = nullptr;
    for (Kept& k : pool().kept) {
      // A much larger buffer is left for a request that needs it.
      const bool fits = k.memory && k.capacity >= wanted && k.capacity / 4 <= wanted + 4096;
      if (fits && (!best || k.capacity < best->capacity)) best = &k;
    }
    if (best) {
      void* memory = best->memory;
      *capacity = best->capacity;
      pool().total -= best->capacity;
      *best = {};
      return memory;
    }
  }
  void* memory = std::aligned_alloc(64, wanted);
  if (!memory) throw std::bad_alloc();
  *capacity = wanted;
  return memory;
}

void give_memory(void* memory, size_t capacity) noexcept {
  if (pool_closed || capacity > KEPT_BYTES) {
    std::free(memory);
    return;
  }
  Pool& mine = pool();
  Kept* slot = nullptr;
  // Full: what nobody has asked for longest makes room. Kept by size, large ones that no call needs any
  // more would fill the pool for good, and every small buffer would go to the heap and back.
  while (true) {
    Kept* oldest = nullptr;
    for (Kept& k : mine.kept) {
      if (!k.memory) slot = &k;
      else if (!oldest || k.given < oldest->given) oldest = &k;
    }
    if (slot && mine.total + capacity <= KEPT_BYTES) break;
    mine.total -= oldest->capacity;
    std::free(oldest->memory);
    *oldest = {};
  }
  *slot = {memory, capacity, ++mine.clock};
  mine.total += capacity;
}

}  // namespace blockgate
