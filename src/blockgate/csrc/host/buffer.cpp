#include "host/buffer.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define BLOCKGATE_MAPS 1
#endif

namespace blockgate {
namespace {

// Buffers from this size on are pages of their own, not part of the heap: between those of other libraries, large
// ones that come and go would leave it full of holes. All threads share those that are kept.
constexpr size_t LARGE = size_t(128) << 10;
constexpr size_t KEPT_LARGE = size_t(64) << 20, KEPT_SMALL = size_t(1) << 20;
constexpr int LARGE_BUFFERS = 64, SMALL_BUFFERS = 12;
// More is never meant: it comes from sizes that nobody has checked.
constexpr size_t MOST = size_t(1) << 47;

// For tests: which of the next requests fails, counted down; below 0: none.
std::atomic<int64_t> requests_left{-1};
std::atomic<int64_t> requests{0};

void count_request() {
  if (requests_left.load(std::memory_order_relaxed) < 0) return;
  requests.fetch_add(1, std::memory_order_relaxed);
  if (requests_left.fetch_sub(1, std::memory_order_relaxed) == 1) throw std::bad_alloc();
}

// Null if there is none.
void* from_system(size_t capacity) noexcept {
#if defined(BLOCKGATE_MAPS)
  if (capacity >= LARGE) {
    void* memory =
        mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
  }
#endif
  return std::aligned_alloc(64, capacity);
}

void to_system(void* memory, [[maybe_unused]] size_t capacity) noexcept {
#if defined(BLOCKGATE_MAPS)
  if (capacity >= LARGE) {
    munmap(memory, capacity);
    return;
  }
#endif
  std::free(memory);
}

struct Kept {
  void* memory;
  size_t capacity;
  uint64_t given;
};

// Freed buffers, up to a number and a total. Plain data.
template <int BUFFERS, size_t BYTES>
struct Shelf {
  Kept kept[BUFFERS];
  size_t total;
  uint64_t clock;

  // Null if none fits.
  void* take(size_t wanted, size_t* capacity) {
    Kept* best = nullptr;
    for (Kept& k : kept) {
      // A much larger buffer is left for a request that needs it.
      const bool fits = k.memory && k.capacity >= wanted && k.capacity / 4 <= wanted + 4096;
      if (fits && (!best || k.capacity < best->capacity)) best = &k;
    }
    if (!best) return nullptr;
    void* memory = best->memory;
    *capacity = best->capacity;
    total -= best->capacity;
    *best = {};
    return memory;
  }

  // Full: what nobody has asked for longest makes room. Kept by size, large ones that no call needs any
  // more would fill the shelf for good, and every other buffer would go to the system and back.
  void give(void* memory, size_t capacity) {
    Kept* slot = nullptr;
    while (true) {
      Kept* oldest = nullptr;
      for (Kept& k : kept) {
        if (!k.memory) slot = &k;
        else if (!oldest || k.given < oldest->given) oldest = &k;
      }
      if (slot && total + capacity <= BYTES) break;
      total -= oldest->capacity;
      to_system(oldest->memory, oldest->capacity);
      *oldest = {};
    }
    *slot = {memory, capacity, ++clock};
    total += capacity;
  }
};

// Set when the thread's shelf is gone, so that buffers freed later in its exit go to the system.
thread_local bool closed = false;

struct OwnShelf : Shelf<SMALL_BUFFERS, KEPT_SMALL> {
  ~OwnShelf() {
    closed = true;
    for (Kept& k : kept)
      if (k.memory) to_system(k.memory, k.capacity);
  }
};

OwnShelf& own_shelf() {
  thread_local OwnShelf instance{};
  return instance;
}

// One for all threads; a few numbers are looked at while it is held.
Shelf<LARGE_BUFFERS, KEPT_LARGE> shared_shelf{};
std::atomic_flag shared_in_use = ATOMIC_FLAG_INIT;

// Holds the shared shelf, or gives up: whoever held it may be gone, in a forked child for ever.
struct Hold {
  bool held = false;
  Hold() {
    for (int tries = 0; tries < 4096 && !held; ++tries)
      held = !shared_in_use.test_and_set(std::memory_order_acquire);
  }
  ~Hold() {
    if (held) shared_in_use.clear(std::memory_order_release);
  }
};

void* from_shelf(size_t wanted, size_t* capacity) {
  if (wanted < LARGE) return closed ? nullptr : own_shelf().take(wanted, capacity);
  const Hold hold;
  return hold.held ? shared_shelf.take(wanted, capacity) : nullptr;
}

// Rounded up to one of four sizes between a power of two and the next: groups of rows differ a little in
// size from call to call. Large ones are whole pages.
size_t size_class(size_t bytes) {
  size_t step = 64;
  while (8 * step < bytes) step *= 2;
  return (bytes + step) / step * step;
}

}  // namespace

int64_t fail_request(int64_t which) {
  requests_left.store(which > 0 ? which : -1, std::memory_order_relaxed);
  return requests.exchange(0, std::memory_order_relaxed);
}

size_t kept_memory() {
  const Hold hold;
  return hold.held ? shared_shelf.total : std::numeric_limits<size_t>::max();
}

void* take_memory(int64_t count, size_t size, size_t* capacity) {
  if (count < 0 || size_t(count) > MOST / size) throw std::bad_alloc();
  count_request();
#if defined(__SANITIZE_ADDRESS__)
  // Nothing is kept, and nothing rounded to more than the alignment: a step past the end shows.
  const size_t wanted = (size_t(count) * size + 64) / 64 * 64;
  void* memory = std::aligned_alloc(64, wanted);
#else
  const size_t wanted = size_class(size_t(count) * size);
  if (void* memory = from_shelf(wanted, capacity)) return memory;
  void* memory = from_system(wanted);
#endif
  if (!memory) throw std::bad_alloc();
  *capacity = wanted;
  return memory;
}

void give_memory(void* memory, size_t capacity) noexcept {
#if defined(__SANITIZE_ADDRESS__)
  std::free(memory);
  (void)capacity;
#else
  if (capacity < LARGE && !closed) return own_shelf().give(memory, capacity);
  if (capacity >= LARGE && capacity <= KEPT_LARGE) {
    const Hold hold;
    if (hold.held) return shared_shelf.give(memory, capacity);
  }
  to_system(memory, capacity);
#endif
}

}  // namespace blockgate
