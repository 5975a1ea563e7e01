#include <pacer/session/detail/training_checks.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include <c10/util/Exception.h>

#include <pacer/collectives/launch_environment.h>
#include <pacer/core/error.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/sharded_state.h>
#include <pacer/modules/deferred.h>

namespace pacer::detail {
namespace {

constexpr int64_t kAttemptsBetweenLooks = 10;
constexpr int64_t kTooManySkipped = 30;

std::vector<char> needs_gradient(const SessionParts& parts) {
  std::vector<char> needs;
  for (const auto& group : parts.optimizer().param_groups()) {
    for (const at::Tensor& parameter : group.params()) needs.push_back(parameter.requires_grad());
  }
  return needs;
}

}  // namespace

void check_values(const SessionParts& parts) {
  const bool gives_values = parts.sharded_state != nullptr && parts.sharded_state->shares_parameters();
  for (const auto& item : parts.model().named_parameters()) {
    require(
        gives_values || !is_deferred(item.value()), "parameter ", item.key(),
        " has no values, because defer_initialization took its memory; add session.use(Shards(model->blocks, "
        "ShardsOptions().materialize(...))), which gives it values, or leave defer_initialization out");
    require(!item.value().is_meta(), "parameter ", item.key(),
            " is on the meta device, where it has no values and gets none; make the model on ",
            parts.world().device().str(),
            ", and for one that is larger than a machine call defer_initialization for each block once it is "
            "made");
  }
  try {
    for (const at::Tensor& parameter : all_optimizer_parameters(parts)) {
      if (!is_deferred(parameter)) (void)parameter.const_data_ptr();
    }
  } catch (const c10::Error&) {
    throw InvalidArgument(
        "the parameters of this model are shared out by another Session, whose Shards hook keeps parts of "
        "them; keep that Session for the whole run, or save a checkpoint there and resume from it with a new "
        "model and optimizer");
  }
}

void check_single_rank() {
  require(!Communicator::joins_processes(),
          "this process has a Communicator that joins several ranks, but the Session was given none, so each "
          "rank would train a model of its own; pass it as Session(model, optimizer, world), or pass "
          "Communicator::alone(device) where that is meant");
  LaunchEnvironment launch;
  try {
    launch = read_launch_environment();
  } catch (const InvalidArgument&) {
    return;  // whoever wants to join ranks will hear of it
  }
  if (launch.world_size > 1 && launch.rank == 0) {
    TORCH_WARN(concatenate(
        launch.launcher, " started ", launch.world_size,
        " ranks, but this Session was given no Communicator, so each rank trains a model of its own; make "
        "one with Communicator::from_environment() and pass it as Session(model, optimizer, world)"));
  }
}

void check_gradients(const SessionParts& parts, bool there_were) {
  for (const auto& group : parts.optimizer().param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) return;
    }
  }
  const std::vector<char> needs = needs_gradient(parts);
  const bool others_train = parts.replicas != nullptr && parts.world().world_size() > 1;
  if (others_train) {
    const bool sits_out = !there_were && parts.unused_is_zero;
    if (sits_out || std::count(needs.begin(), needs.end(), 1) == 0) return;
  }
  require(std::count(needs.begin(), needs.end(), 1) > 0, "none of the optimizer's ", needs.size(),
          " parameters needs a gradient, so the step would change nothing; unfreeze them, call set_adapter() "
          "with the adapter that the optimizer was made for, or make another optimizer and Session");
  throw InvalidArgument(
      "no parameter of the optimizer has a gradient; delete zero_grad() from the loop if it stands between "
      "backward() and step(), and take a loss that depends on the optimizer's parameters; a model that was "
      "made anew needs a new optimizer and Session");
}

void SkippedStepsWatch::after_step(const SessionParts& parts) {
  if (!parts.has_guard()) return;
  ++attempts_;
  if (check_ && check_->arrived()) {
    kernels::GradientCheck check;
    std::memcpy(&check, check_->value().const_data_ptr(), sizeof check);
    check_.reset();
    look(check.skipped_steps);
  }
  if (!check_ && attempts_ - asked_at_ >= kAttemptsBetweenLooks) {
    check_ = start_host_copy(parts.guard_memory());
    asked_at_ = attempts_;
  }
}

void SkippedStepsWatch::look(int64_t skipped) {
  const bool all_were = skipped - last_skipped_ >= asked_at_ - last_attempts_;
  in_a_row_ = all_were ? in_a_row_ + asked_at_ - last_attempts_ : 0;
  last_skipped_ = skipped;
  last_attempts_ = asked_at_;
  if (!all_were) warns_.renew();
  if (in_a_row_ < kTooManySkipped || !warns_.take()) return;
  TORCH_WARN(concatenate(
      "the last ", in_a_row_,
      " steps changed nothing, because their gradients were not finite; look for numbers that are not "
      "finite in data and parameters, and lower the learning rate"));
}

}  // namespace pacer::detail
