// Something that is said once, by the first rank for all: warnings and the like of a Session and its hooks.
#pragma once

#include <utility>

namespace pacer {

class OnceOnFirstRank {
 public:
  // Says nothing: what a hook has before it is attached.
  OnceOnFirstRank() = default;
  explicit OnceOnFirstRank(bool is_first_rank) : is_first_rank_(is_first_rank), is_due_(is_first_rank) {}

  // Whether to say it now: true on the first rank, the first time.
  bool take() { return std::exchange(is_due_, false); }
  // It may be said once more.
  void renew() { is_due_ = is_first_rank_; }

 private:
  bool is_first_rank_ = false;
  bool is_due_ = false;
};

}  // namespace pacer
