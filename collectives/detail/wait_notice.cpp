#include <pacer/collectives/detail/wait_notice.h>

#include <cstdio>
#include <utility>

#include <pacer/core/error.h>

namespace pacer::detail {

WaitNotice::WaitNotice(int rank, std::string place, std::chrono::milliseconds timeout, bool speaks)
    : rank_(rank), place_(std::move(place)), timeout_(timeout), speaks_(speaks) {}

void WaitNotice::look(const std::string& missing, const std::string& advice) {
  constexpr int kShare = 20;
  if (!speaks_ || (std::chrono::steady_clock::now() - start_) * kShare < timeout_) return;
  speaks_ = false;
  const auto seconds = [](std::chrono::milliseconds time) {
    return static_cast<double>(time.count()) / 1000;
  };
  const std::string text =
      concatenate("pacer: rank ", rank_, " has waited ", seconds(timeout_ / kShare), " s at ", place_,
                  " for ", missing, ", and will for ", seconds(timeout_), " s in all; ", advice, "\n");
  std::fputs(text.c_str(), stderr);
}

}  // namespace pacer::detail
