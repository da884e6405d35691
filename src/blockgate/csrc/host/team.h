// Threads that walk through many short phases together, in one parallel region.
//
// Entering a parallel region costs microseconds, as much as a whole step of a small recurrence; the
// end of a phase costs a few hundred nanoseconds. Every member runs the same sequence of phases. A
// phase is over when all its tasks are done, whoever did them: members may come late or not at all,
// as they do where torch runs the region on the calling thread alone, and nobody waits for them.
#pragma once

#include "host/parallel.h"

#include <atomic>
#include <thread>

namespace blockgate {

inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// What the members share. `ticket` holds the number of the current phase and its next task.
struct TeamState {
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<int64_t> done{0};
};

class TeamMember {
 public:
  // Null: works alone.
  explicit TeamMember(TeamState* state) : state_(state) {}

  // Runs task(0) .. task(count - 1), shared out among the members, and returns when all are done.
  // Every member must come with the same count. Tasks must not throw: the others would wait.
  template <class Task>
  void phase(int64_t count, const Task& task) noexcept {
    if (!state_) {
      for (int64_t i = 0; i < count; ++i) task(i);
      return;
    }
    if (count == 0) return;
    const uint64_t number = number_++;
    int64_t spins = 0;
    for (;;) {
      uint64_t ticket = state_->ticket.load(std::memory_order_acquire);
      if (ticket >> 32 != number) return;
      const int64_t next = int64_t(ticket & 0xffffffff);
      if (next >= count) {
        // On a crowded machine the thread that is waited for may need this core.
        if (++spins < 4096) spin_pause();
        else std::this_thread::yield();
        continue;
      }
      if (!state_->ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel))
        continue;
      task(next);
      if (state_->done.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
        state_->done.store(0, std::memory_order_relaxed);
        state_->ticket.store((number + 1) << 32, std::memory_order_release);
      }
    }
  }

 private:
  TeamState* state_;
  uint64_t number_ = 0;
};

// Runs body(member) on up to `threads` threads. What body does before its first phase may throw.
template <class Body>
void run_team(int64_t threads, const Body& body) {
  if (threads <= 1) {
    body(TeamMember(nullptr));
    return;
  }
  TeamState state;
  torch::stable::parallel_for(0, threads, 1,
                              [&](int64_t, int64_t) { body(TeamMember(&state)); });
}

}  // namespace blockgate
