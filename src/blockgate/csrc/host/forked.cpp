#include "host/forked.h"

#include <atomic>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace blockgate {
namespace {

std::atomic<bool> in_child{false};

#if defined(__unix__) || defined(__APPLE__)
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { in_child.store(true, std::memory_order_relaxed); });
#endif

}  // namespace

bool forked() { return in_child.load(std::memory_order_relaxed); }

}  // namespace blockgate
