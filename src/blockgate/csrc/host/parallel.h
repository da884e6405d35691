// Tasks on torch's own threads.
#pragma once

#include "host/forked.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>

#ifdef BLOCKGATE_OWN_THREADS
#include <thread>
#include <vector>
#endif

namespace blockgate {

inline thread_local int64_t most_threads = std::numeric_limits<int64_t>::max();

// While it lives, what its thread runs takes at most so many threads.
class ThreadLimit {
 public:
  explicit ThreadLimit(int64_t most) : before_(most_threads) { most_threads = std::min(most, before_); }
  ~ThreadLimit() { most_threads = before_; }
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;

 private:
  int64_t before_;
};

inline int64_t thread_count() {
  return forked() ? 1 : std::min<int64_t>(torch::stable::get_num_threads(), most_threads);
}

// Calls body() on up to `threads` threads at once.
template <class Body>
void call_on_threads(int64_t threads, const Body& body) {
#ifdef BLOCKGATE_OWN_THREADS
  // For ThreadSanitizer, which can't see how OpenMP's threads wait for one another.
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i) others.emplace_back(body);
  body();
  for (std::thread& other : others) other.join();
#else
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { body(); });
#endif
}

// The same. The first exception is thrown on once all have ended: torch would tell of none but that
// its call has failed.
template <class Body>
void run_on_threads(int64_t threads, const Body& body) {
  std::exception_ptr thrown;
  std::atomic<bool> taken{false};
  call_on_threads(threads, [&] {
    try {
      body();
    } catch (...) {
      if (!taken.exchange(true)) thrown = std::current_exception();
    }
  });
  if (thrown) std::rethrow_exception(thrown);
}

// Runs task(0) .. task(count - 1). Threads take the next task when they finish one, so uneven
// tasks balance. Inside another parallel region torch runs this on the calling thread alone.
template <class Task>
void run_tasks(int64_t count, int64_t threads, const Task& task) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  std::atomic<int64_t> next{0};
  run_on_threads(threads < count ? threads : count, [&] {
    for (;;) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      task(i);
    }
  });
}

// Threads worth waking for `work` multiply-adds (or a like unit of about a tenth of a nanosecond).
inline int64_t threads_for(int64_t work) {
  constexpr int64_t WORK_PER_THREAD = 50000;
  const int64_t useful = work / WORK_PER_THREAD;
  if (useful <= 1) return 1;
  const int64_t available = thread_count();
  return useful < available ? useful : available;
}

}  // namespace blockgate
