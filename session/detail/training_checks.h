// What a Session notices of mistakes that would otherwise train wrong without a word; what concerns gradients
// between two calls is in gradient_watch.h. Nothing here waits for a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <pacer/device/detail/host_copy.h>
#include <pacer/hooks/once_on_first_rank.h>
#include <pacer/hooks/session_parts.h>

namespace pacer::detail {

// Throws InvalidArgument where another Session's Shards keeps parts of the parameters, which then have no
// values here.
void check_values(const SessionParts& parts);

// For a Session that was given no Communicator. Throws InvalidArgument where this process has one of several
// processes; warns where a launcher started several.
void check_single_rank();

// Throws InvalidArgument where no parameter of the optimizer has a gradient. A rank of a pipeline may have
// nothing that needs one, or with unused_is_zero nothing that was reached. `there_were`: gradients, when the
// window's last backward ended.
void check_gradients(const SessionParts& parts, bool there_were);

// Warns once, on the first rank, where 30 steps in a row changed nothing because gradients were not finite;
// once more where that comes again. It learns that late.
class SkippedStepsWatch {
 public:
  explicit SkippedStepsWatch(const SessionParts& parts) : warns_(parts.is_first_rank()) {}
  void after_step(const SessionParts& parts);

 private:
  void look(int64_t skipped);

  std::unique_ptr<HostCopy> check_;  // on its way to the host
  int64_t attempts_ = 0;
  int64_t asked_at_ = 0;                          // attempts, when check_ was read
  int64_t last_attempts_ = 0, last_skipped_ = 0;  // of the look before
  int64_t in_a_row_ = 0;
  OnceOnFirstRank warns_;
};

}  // namespace pacer::detail
