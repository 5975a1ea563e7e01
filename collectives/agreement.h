// Agreement: before anything is sent that ranks could understand differently, they compare what they are and
// what they are about to do. A difference is the same error on every rank, and names the first one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/communicator.h>

namespace pacer {

// Something that must be the same on all ranks, for example {"parameter 3", "h.0.weight, Float [64, 64]"}.
struct Fact {
  std::string what;
  std::string value;
};

// Throws CommunicationError on every rank where any fact differs. `step`: of training. Costs one message of
// fixed size while all agree.
void require_agreement(Communicator& world, int64_t step, const std::vector<Fact>& facts);
// The same for facts that follow from `numbers`: they are made only where ranks have different ones.
void require_agreement(Communicator& world, int64_t step, const std::vector<int64_t>& numbers,
                       const std::function<std::vector<Fact>()>& facts);

// What a rank is about to do with the others.
enum class Intent : int64_t { agree = 1, step, last_step, finish, save, load, micro_step };

// What each rank says of itself before ranks do something together.
struct RankStatus {
  int64_t kind = 0x737574617473;  // "status": tells it from other messages that ranks compare
  Intent intent = Intent::step;
  int64_t step = 0;           // attempts completed
  int64_t micro_steps = 1;    // of this window
  double weight = 0;          // of the window's gradients, see Session
  int64_t tokens = 0;         // in the window
  int32_t stop = 0;           // 1: this rank asks all to stop after the step
  int32_t has_changes = 0;    // 1: something changed here that ranks have not compared or shared
  char fingerprint[32] = {};  // of what else must be equal
};

// The statuses of all ranks, in rank order.
class StatusExchange {
 public:
  StatusExchange() = default;
  // Starts it.
  StatusExchange(Communicator& world, const RankStatus& own);
  bool is_under_way() const { return all_.defined(); }
  // Whether wait() would not block.
  bool is_done() const { return work_.is_done(); }
  // Throws CommunicationError, on every rank, where intent, step or micro-steps differ, and where another
  // rank is not here but in a collective of its own.
  std::vector<RankStatus> wait();

 private:
  at::Tensor own_, all_;
  int rank_ = 0;
  Work work_;
};

}  // namespace pacer
