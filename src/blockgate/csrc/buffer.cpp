#include "buffer.h"

#include <cstdlib>
#include <new>

namespace blockgate {
namespace {

constexpr size_t KEPT_BYTES = size_t(64) << 20;
constexpr int KEPT_BUFFERS = 12;

struct Kept {
  void* memory;
  size_t capacity;
};

// Set when the thread's pool is gone, so that buffers freed later in its exit go to the system.
thread_local bool pool_closed = false;

struct Pool {
  Kept kept[KEPT_BUFFERS] = {};
  size_t total = 0;
  ~Pool() {
    pool_closed = true;
    for (Kept& k : kept) std::free(k.memory);
  }
};

Pool& pool() {
  thread_local Pool instance;
  return instance;
}

}  // namespace

void* take_memory(size_t bytes, size_t* capacity) {
  const size_t wanted = (bytes + 64) / 64 * 64;
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
  if (!pool_closed && capacity <= KEPT_BYTES) {
    Pool& mine = pool();
    // Full: the smallest makes room, being the cheapest to get again.
    while (true) {
      Kept* free_slot = nullptr;
      Kept* smallest = nullptr;
      for (Kept& k : mine.kept) {
        if (!k.memory) free_slot = &k;
        else if (!smallest || k.capacity < smallest->capacity) smallest = &k;
      }
      if (free_slot && mine.total + capacity <= KEPT_BYTES) {
        *free_slot = {memory, capacity};
        mine.total += capacity;
        return;
      }
      if (!smallest || smallest->capacity >= capacity) break;
      mine.total -= smallest->capacity;
      std::free(smallest->memory);
      *smallest = {};
    }
  }
  std::free(memory);
}

}  // namespace blockgate
