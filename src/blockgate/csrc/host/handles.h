// Things that were prepared for many calls, each named by a number from then on.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace blockgate __attribute__((visibility("hidden"))) {

template <class T>
class HandleTable {
 public:
  // `what` stands in the message for a number that names nothing.
  explicit HandleTable(const char* what) : what_(what) {}

  int64_t add(T value) {
    auto shared = std::make_shared<const T>(std::move(value));
    const std::unique_lock lock(mutex_);
    values_.emplace(next_, std::move(shared));
    return next_++;
  }

  std::shared_ptr<const T> find(int64_t handle) {
    const std::shared_lock lock(mutex_);
    const auto found = values_.find(handle);
    STD_TORCH_CHECK(found != values_.end(), "handle: expected ", what_, ", got ", handle);
    return found->second;
  }

  void remove(int64_t handle) {
    std::shared_ptr<const T> last;  // freed after the lock
    const std::unique_lock lock(mutex_);
    const auto found = values_.find(handle);
    if (found == values_.end()) return;
    last = std::move(found->second);
    values_.erase(found);
  }

 private:
  const char* what_;
  std::shared_mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const T>> values_;
  int64_t next_ = 1;
};

}  // namespace blockgate
