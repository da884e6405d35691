// Tasks on torch's own threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>

namespace blockgate {

inline int64_t thread_count() { return torch::stable::get_num_threads(); }

// Runs task(0) .. task(count - 1). Threads take the next task when they finish one, so uneven
// tasks balance. Inside another parallel region torch runs this on the calling thread alone.
template <class Task>
void run_tasks(int64_t count, int64_t threads, const Task& task) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads < count ? threads : count, 1, [&](int64_t, int64_t) {
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
