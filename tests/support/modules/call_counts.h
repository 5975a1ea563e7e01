// Counts the operators that LibTorch runs while it exists, on all threads.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include <ATen/record_function.h>

namespace pacer::testing {

class CallCounts {
 public:
  CallCounts() {
    current() = this;
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(&CallCounts::count).scopes({at::RecordScope::FUNCTION}));
  }
  CallCounts(const CallCounts&) = delete;
  ~CallCounts() {
    at::removeCallback(handle_);
    current() = nullptr;
  }

  int64_t of(std::initializer_list<const char*> names) const {
    int64_t sum = 0;
    for (const char* name : names) {
      const auto found = calls_.find(name);
      if (found != calls_.end()) sum += found->second;
    }
    return sum;
  }
  int64_t products() const {
    return of({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv"});
  }

 private:
  static CallCounts*& current() {
    static CallCounts* only = nullptr;
    return only;
  }
  static std::unique_ptr<at::ObserverContext> count(const at::RecordFunction& function) {
    const std::lock_guard<std::mutex> lock(current()->mutex_);
    ++current()->calls_[function.name()];
    return nullptr;
  }

  at::CallbackHandle handle_ = 0;
  std::mutex mutex_;
  std::map<std::string, int64_t> calls_;
};

}  // namespace pacer::testing
