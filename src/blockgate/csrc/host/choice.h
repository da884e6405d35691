// Which of a few ways to compute the same thing is the fastest, by what calls really took.
//
// Free of torch, and of any clock but the one it is given. A choice keeps a running estimate of each
// way's time. Calls take the way with the smallest; now and then one looks at another way, at most
// one call in CALLS_PER_LOOK but for a few that were saved up. On a crowded machine a call on several
// threads waits for one that has no core: when a call takes SEVERAL times its estimate, the next ones
// run on one thread at once, until a look shows that the threads are free again. A call after a pause
// finds its weights gone from the cache, and teaches nothing.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace blockgate __attribute__((visibility("hidden"))) {

inline double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Choice {
 public:
  using Clock = double (*)();

  static constexpr int MOST_WAYS = 4;
  static constexpr double CALLS_PER_LOOK = 500;
  // Looks that may be saved up: the first ones, and those after a moment's disturbance.
  static constexpr double MOST_LOOKS = 4;
  // Calls from one look to the next: at first and after every change of ways, and at ease.
  static constexpr int64_t SOON = 8, PATIENCE = 2048;
  static constexpr double SEVERAL = 2.5;
  // A way must be better by this share to replace the present one.
  static constexpr double MARGIN = 0.05;
  // Seconds between two calls that may be a pause, if they are also SEVERAL times what is usual.
  static constexpr double PAUSE = 1e-3;
  // Calls that an estimate remembers, about.
  static constexpr double MEMORY = 16;

  struct Way {
    int64_t threads;
    int kind;  // the caller's own number
    bool operator==(const Way&) const = default;
  };

  // What there is to choose from; the first way is the best guess.
  struct Ways {
    int count = 0;
    std::array<Way, MOST_WAYS> of{};
    void add(Way way) { of[count++] = way; }
    bool operator==(const Ways&) const = default;
  };

  struct State {
    Ways ways;
    std::array<double, MOST_WAYS> seconds{};  // for a unit of work; 0: not known
    int present = 0;                          // the way that calls take
    int64_t calls = 0, looks = 0, falls = 0;
  };

  explicit Choice(Clock clock = steady_seconds) : clock_(clock) {}

  // For tests that need the same way at every call: all choices take this one, or their last, and learn
  // nothing. Below 0: they choose.
  static void hold(int way) { held.store(way, std::memory_order_relaxed); }

  // Runs run(way), and learns what it took. Other ways than the last time are learned anew; `work` is
  // in any unit.
  template <class Run>
  void run(const Ways& ways, double work, const Run& run) {
    if (const int way = held.load(std::memory_order_relaxed); way >= 0)
      return run(ways.of[std::min(way, ways.count - 1)]);
    const double begin = clock_();
    bool cold = false;
    const int way = choose(ways, begin, cold);
    run(ways.of[way]);
    learn(way, begin, work, cold);
  }

  State state() const {
    const std::lock_guard lock(mutex_);
    return state_;
  }

 private:
  int choose(const Ways& ways, double begin, bool& cold) {
    const std::lock_guard lock(mutex_);
    if (ways != state_.ways) {
      state_ = {.ways = ways};
      savings_ = MOST_LOOKS;
      look_soon();
      next_way_ = 0;
      usual_gap_ = last_end_ = 0;
    }
    cold = after_pause(begin);
    ++state_.calls;
    savings_ = std::min(MOST_LOOKS, savings_ + 1 / CALLS_PER_LOOK);
    if (cold || ways.count == 1 || state_.calls < next_look_ || savings_ < 1) return state_.present;
    savings_ -= 1;
    ++state_.looks;
    if (next_way_ == state_.present) step();
    const int way = next_way_;
    step();
    interval_ = std::min(2 * interval_, PATIENCE);
    next_look_ = state_.calls + interval_;
    return way;
  }

  void learn(int way, double begin, double work, bool cold) {
    const std::lock_guard lock(mutex_);
    last_end_ = clock_();
    // Another thread may have brought other ways meanwhile.
    if (cold || way >= state_.ways.count) return;
    const double took = (last_end_ - begin) / work;
    double& estimate = state_.seconds[way];
    if (way != state_.present) {  // a look
      estimate = took;
      if (better(way)) take(way);
      return;
    }
    const double most = estimate > 0 ? SEVERAL * estimate : took;
    if (took > most && !alone(way) && fall(took)) return;
    estimate += (std::min(took, most) - estimate) / (estimate > 0 ? MEMORY : 1);
    for (int other = 0; other < state_.ways.count; ++other)
      if (better(other)) take(other);
  }

  // So is the very first call.
  bool after_pause(double begin) {
    if (last_end_ == 0) return true;
    const double gap = begin - last_end_, most = SEVERAL * usual_gap_;
    const bool known = usual_gap_ > 0;
    usual_gap_ += ((known ? std::min(gap, most) : gap) - usual_gap_) / (known ? MEMORY : 1);
    return known && gap > PAUSE && gap > most;
  }

  // To the best way on one thread, if this call would have taken less there.
  bool fall(double took) {
    int best = -1;
    for (int w = 0; w < state_.ways.count; ++w)
      if (alone(w) && (best < 0 || expected(w) < expected(best))) best = w;
    if (best < 0 || took < expected(best)) return false;
    ++state_.falls;
    // Whatever takes several threads waits for the same core.
    for (int w = 0; w < state_.ways.count; ++w)
      if (!alone(w)) state_.seconds[w] = std::max(state_.seconds[w], took);
    next_way_ = state_.present;
    take(best);
    return true;
  }

  // What is not known takes at most as many times longer on one thread as there were threads.
  double expected(int way) const {
    const double known = state_.seconds[way];
    return known > 0 ? known : state_.seconds[state_.present] * double(state_.ways.of[state_.present].threads);
  }
  bool alone(int way) const { return state_.ways.of[way].threads == 1; }
  bool better(int way) const {
    const double seconds = state_.seconds[way];
    return seconds > 0 && seconds < (1 - MARGIN) * state_.seconds[state_.present];
  }
  void take(int way) {
    state_.present = way;
    look_soon();
  }
  void look_soon() {
    interval_ = SOON;
    next_look_ = state_.calls + interval_;
  }
  void step() { next_way_ = (next_way_ + 1) % state_.ways.count; }

  static inline std::atomic<int> held{-1};

  Clock clock_;
  mutable std::mutex mutex_;
  State state_;
  int64_t interval_ = SOON, next_look_ = 0;
  double savings_ = 0, usual_gap_ = 0, last_end_ = 0;
  int next_way_ = 0;
};

}  // namespace blockgate
