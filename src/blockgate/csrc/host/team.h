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
    for (;;) {
      const int64_t mine = claim(number, count);
      if (mine == count) break;
      task(mine);
      finish(number, count);
    }
    wait_for_end(number);
  }

  // As `phase`, for tasks that know what their thread does after them: task(i, next), where next is
  // `count` at the end. A member claims a task while it still has one to do.
  template <class Task>
  void phase_ahead(int64_t count, const Task& task) noexcept {
    if (!state_) {
      for (int64_t i = 0; i < count; ++i) task(i, i + 1);
      return;
    }
    if (count == 0) return;
    const uint64_t number = number_++;
    for (int64_t mine = claim(number, count), next; mine < count; mine = next) {
      next = claim(number, count);
      task(mine, next);
      finish(number, count);
    }
    wait_for_end(number);
  }

 private:
  // The next task of a phase; `count` if none is left or the phase is over.
  int64_t claim(uint64_t number, int64_t count) {
    uint64_t ticket = state_->ticket.load(std::memory_order_acquire);
    while (ticket >> 32 == number && int64_t(ticket & 0xffffffff) < count)
      if (state_->ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel))
        return int64_t(ticket & 0xffffffff);
    return count;
  }

  void finish(uint64_t number, int64_t count) {
    if (state_->done.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
    state_->done.store(0, std::memory_order_relaxed);
    state_->ticket.store((number + 1) << 32, std::memory_order_release);
  }

  void wait_for_end(uint64_t number) {
    for (int64_t spins = 0; state_->ticket.load(std::memory_order_acquire) >> 32 == number;)
      // On a crowded machine the thread that is waited for may need this core.
      if (++spins < 4096) spin_pause();
      else std::this_thread::yield();
  }

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
  run_on_threads(threads, [&] { body(TeamMember(&state)); });
}

}  // namespace blockgate
