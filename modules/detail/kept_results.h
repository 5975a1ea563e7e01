// Results that a region keeps from its first run for its second: see kept_operators.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include <pacer/device/detail/random_state.h>
#include <pacer/modules/detail/operator_list.h>

namespace pacer::detail {

// A call of an operator: its arguments on the stack, then its results.
struct OperatorCall {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keys;
  torch::jit::Stack& stack;

  void run() const;  // below the key of kept operators
};

class KeptResults {
 public:
  // The region's name is for errors; a null list keeps nothing.
  KeptResults(std::string region, std::shared_ptr<const OperatorList> operators);

  bool is_empty() const { return operators_ == nullptr; }
  bool is_second() const { return is_second_; }
  std::optional<size_t> index_of(const c10::OperatorHandle& op) const;

  // First run: runs operator `i` by `run` and keeps its results.
  void keep(size_t i, const OperatorCall& call, const std::function<void()>& run);
  // What is kept in the memory of this tensor gets memory of its own.
  void copy_before_change(const at::Tensor& changed);
  // From the call with this number on, in the order of all calls, results are not kept after all.
  size_t calls() const { return calls_; }
  void let_go_from(size_t call);
  // Throws where a kept result was changed in place.
  void end_first_run() const;

  // Second run. `stays`: there may be a third. Throws where an earlier one did not know of this one.
  void begin_second_run(bool stays);
  // Gives the next results of operator `i` in place of the call, or returns false where it must run. Throws where the
  // first run did not call it so.
  bool hand_out(size_t i, const OperatorCall& call);
  // Throws where the first run called an operator more often.
  void end_second_run() const;
  // Frees what was not handed out, if there is no third run.
  void end_pass() noexcept;
  // There is none.
  void forget() noexcept;

 private:
  struct Result {
    std::vector<int64_t> arguments;     // shapes, dtypes and numbers
    std::vector<c10::IValue> values;    // aliases of what the call gave
    std::vector<int64_t> versions;      // of the tensors among them
    std::optional<RandomState> random;  // behind the call, where it drew numbers
    at::Device device = at::kCPU;       // whose generator that is
    size_t call = 0;
    bool is_kept = true;
  };
  struct Queue {
    std::vector<Result> results;
    size_t next = 0;
  };
  void check_unchanged(const Result& result, size_t i) const;

  std::string region_;
  std::shared_ptr<const OperatorList> operators_;
  std::vector<Queue> queues_;  // by operator
  size_t calls_ = 0;           // of the first run
  bool is_second_ = false, stays_ = false, is_spent_ = false;
};

}  // namespace pacer::detail
