// What is thrown when ranks cannot go on together: one died, stopped, left, or does something else than the
// others. After one of these a Communicator is of no more use; training goes on from the last checkpoint.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <pacer/core/error.h>

namespace pacer {

class CommunicationError : public Error {
 public:
  // `sequence`: number of the operation on its Communicator, 1 for the first. `step`: of training, -1 where
  // no step was set. `suspected_ranks`: those that did not answer, or that said they left; empty where nobody
  // can be told from the others.
  CommunicationError(const std::string& message, std::string operation, int64_t sequence, int64_t step,
                     std::vector<int> suspected_ranks)
      : Error(message),
        operation_(std::move(operation)),
        sequence_(sequence),
        step_(step),
        suspected_ranks_(std::move(suspected_ranks)) {}

  const std::string& operation() const { return operation_; }
  int64_t sequence() const { return sequence_; }
  int64_t step() const { return step_; }
  const std::vector<int>& suspected_ranks() const { return suspected_ranks_; }

 private:
  std::string operation_;
  int64_t sequence_;
  int64_t step_;
  std::vector<int> suspected_ranks_;
};

}  // namespace pacer
