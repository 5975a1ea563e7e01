// A word on standard error where ranks that meet wait long for one that does not come.
#pragma once

#include <chrono>
#include <string>

namespace pacer::detail {

class WaitNotice {
 public:
  // The wait begins now and ends after `timeout`. If many ranks are on a host, few should speak.
  WaitNotice(int rank, std::string place, std::chrono::milliseconds timeout, bool speaks);
  // Call it now and then while `missing` ("rank 0", "ranks 2 and 3") do not come. It speaks once, after a
  // twentieth of the timeout: 30 s of 10 minutes. `advice` is the end of the sentence.
  void look(const std::string& missing, const std::string& advice);

 private:
  const int rank_;
  const std::string place_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  bool speaks_;
};

}  // namespace pacer::detail
