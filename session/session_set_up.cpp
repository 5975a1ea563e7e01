// How a Session begins, goes on from a checkpoint, and ends: its parts, its hooks, and what is checked once they are
// all known.
#include <pacer/session/session.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/collectives/detail/all_ranks_or_none.h>
#include <pacer/core/error.h>
#include <pacer/hooks/detail/forward_scope.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/detail/zeroed_gradients.h>
#include <pacer/parallel/data_parallel.h>
#include <pacer/schedulers/layer_drop.h>
#include <pacer/session/detail/gradient_watch.h>
#include <pacer/session/detail/parameter_watch.h>
#include <pacer/session/detail/step_runner.h>
#include <pacer/session/detail/training_checks.h>

namespace pacer {
namespace {

const char* slot_name(Slot slot) {
  constexpr const char* kNames[] = {"data",     "forward",  "loss",   "reduce", "clip",      "optimize",
                                    "schedule", "validate", "decide", "record", "checkpoint"};
  return kNames[static_cast<size_t>(slot)];
}

}  // namespace

torch::nn::Module& Session::existing(torch::nn::Module* model) {
  require(model != nullptr,
          "a Session was given an empty shared_ptr in the place of its model; make the model first");
  return *model;
}

Session::Session(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                 std::shared_ptr<Communicator> world) try
    : parts_(model, optimizer, world),
      gradients_(std::make_unique<detail::GradientWatch>(parts_)),
      trained_(std::make_unique<detail::ParameterWatch>(parts_)),
      skipped_(std::make_unique<detail::SkippedStepsWatch>(parts_)),
      zeroed_(std::make_unique<detail::ZeroedGradients>()),
      warns_of_empty_window_(parts_.is_first_rank()) {
  if (!parts_.world_was_given) detail::check_single_rank();
  if (parts_.session_optimizer()) parts_.session_optimizer()->name_parameters(model.named_parameters());
} catch (const std::exception& error) {
  if (world) detail::leave_after(*world, error);
}

Session::~Session() {
  if (forward_scope_) forward_scope_->end();
  if (training_ && !finished_) {
    leave_peers(std::uncaught_exceptions() > 0 ? "an exception ended its training"
                                               : "its Session ended without finish()");
  }
  if (!finished_ && parts_.progress.micro_step > 0 && std::uncaught_exceptions() == 0) {
    TORCH_WARN(detail::concatenate("a pacer::Session ends with the gradients of ", parts_.progress.micro_step,
                                   " of ", parts_.progress.micro_steps,
                                   " micro-steps unused; call finish() after the loop"));
  } else if (training_ && !finished_ && std::uncaught_exceptions() == 0 &&
             std::any_of(parts_.hooks_.begin(), parts_.hooks_.end(),
                         [](const auto& hook) { return hook->needs_finish(); })) {
    TORCH_WARN(
        "a pacer::Session ends without finish(), so what its hooks write at the end is missing, as the last "
        "checkpoint and metrics; call finish() after the loop");
  }
}

void Session::finish() {
  if (finished_) return;
  require(!in_backward_, "Session::finish after backward without step; call step() after every backward()");
  if (forward_scope_) forward_scope_->end();
  in_forward_ = false;
  if (parts_.progress.micro_step > 0) {
    gradients_->check(parts_);
    take_step();
  }
  for (const auto& hook : parts_.hooks_) hook->finish(parts_.progress);
  finished_ = true;
}

Session& Session::use(std::shared_ptr<Hook> hook) {
  require(hook != nullptr, "Session::use was given a null hook");
  require(hook->hook_name().find('/') == std::string::npos, "the hook ", hook->hook_name(),
          " has a '/' in its name, which is what ends a hook's name in a checkpoint; call it otherwise");
  require(!started_, "Session::use(", hook->hook_name(),
          ") after begin or resume; add all hooks before them");
  detail::set_up(parts_.world(), [&] { add(std::move(hook)); });
  return *this;
}

void Session::add(std::shared_ptr<Hook> hook) {
  for (const auto& other : parts_.hooks_) {
    require(other->hook_name() != hook->hook_name(), "this Session already has the hook ", hook->hook_name(),
            "; use it once");
    require(!(other->exclusive() && hook->exclusive() && other->slot() == hook->slot()), "the hooks ",
            other->hook_name(), " and ", hook->hook_name(), " both do the work of the slot \"",
            slot_name(hook->slot()), "\"; use one of them");
  }
  hook->attach(parts_);
  const auto key = [](const Hook& h) { return std::make_pair(h.slot(), h.hook_name()); };
  const auto place = std::upper_bound(parts_.hooks_.begin(), parts_.hooks_.end(), hook,
                                      [&](const auto& a, const auto& b) { return key(*a) < key(*b); });
  parts_.hooks_.insert(place, std::move(hook));
}

// Once, when all hooks are known.
void Session::start() {
  if (!started_) detail::set_up(parts_.world(), [this] { arrange(); });
}

void Session::arrange() {
  for (const auto& module : parts_.model().modules(/*include_self=*/false)) {
    const auto* gates = dynamic_cast<const LayerDropImpl*>(module.get());
    require(
        gates == nullptr || gates->is_in_use(),
        "the model has a LayerDrop that this Session does not know, so no layer would ever be dropped; add "
        "session.use(layer_drop)");
  }
  detail::check_values(parts_);
  require(
      parts_.sharded_state != nullptr || parts_.session_optimizer() == nullptr ||
          !parts_.session_optimizer()->is_shared_out(),
      "the optimizer has state for this rank's part of the parameters only, because a Session with Shards "
      "used it; use Shards again, or save a checkpoint there and resume from it with a new optimizer");
  detail::check_parameters(parts_);
  const auto joins_ranks = [](const auto& hook) { return hook->exclusive() && hook->slot() == Slot::reduce; };
  const bool are_joined = std::any_of(parts_.hooks_.begin(), parts_.hooks_.end(), joins_ranks);
  if (parts_.world().world_size() > 1 && !are_joined) use(DataParallel());
  parts_.progress.micro_steps = parts_.micro_steps_of(parts_.progress);
  runner_ = std::make_unique<detail::StepRunner>(parts_);
  for (const auto& hook : parts_.hooks_) hook->arrange();
  started_ = true;
}

// Once, when it is known where this run starts.
void Session::start_training() {
  detail::put_session_back(parts_);
  start();
  if (!training_) detail::set_up(parts_.world(), [this] { begin_training(); });
}

void Session::begin_training() {
  if (parts_.session_optimizer()) {
    RunPlan plan;
    plan.unsettled = [this](int64_t step) { return unsettled(step); };
    for (const auto& hook : parts_.hooks_) {
      if (!plan.end) plan.end = hook->steps_until_zero();
    }
    plan.looks_first = parts_.looks_first();
    parts_.session_optimizer()->check_run(parts_.world(), plan);
  }
  for (const auto& hook : parts_.hooks_) hook->start(parts_.progress);
  for (const auto& hook : parts_.hooks_) hook->open(parts_.progress);
  trained_->remember(parts_);
  training_ = true;
}

// What still moves after so many steps, as far as steps say: what ends by tokens is taken to have ended.
std::string Session::unsettled(int64_t step) const {
  Progress then = parts_.progress;
  then.step = step;
  then.micro_step = 0;
  then.tokens = std::numeric_limits<int64_t>::max() / 2;
  for (const auto& hook : parts_.hooks_) {
    if (!hook->settled(then)) return "the hook " + hook->hook_name();
  }
  return "";
}

// What a schedule multiplies, or where there is none, the rates themselves.
std::vector<double> Session::base_rates() const {
  for (const auto& hook : parts_.hooks_) {
    if (std::vector<double> rates = hook->base_rates(); !rates.empty()) return rates;
  }
  return detail::learning_rates(parts_.optimizer());
}

void Session::set_base_rates(const std::vector<double>& rates) {
  for (const auto& hook : parts_.hooks_) {
    if (!hook->base_rates().empty()) return hook->set_base_rates(rates);
  }
  for (size_t g = 0; g < rates.size(); ++g) parts_.optimizer().param_groups()[g].options().set_lr(rates[g]);
}

std::vector<int64_t> Session::saved_steps() {
  require(parts_.saved_steps != nullptr,
          "Session::saved_steps needs a Checkpoints hook; add it with use() first");
  require(is_before_begin(), "Session::saved_steps belongs before the first begin");
  start();
  return parts_.saved_steps();
}

bool Session::is_before_begin() const {
  return parts_.progress.step == 0 && parts_.progress.micro_step == 0 && !in_forward_ && !in_backward_;
}

std::optional<int64_t> Session::resume(const ResumeOptions& options) {
  require(parts_.load_checkpoint != nullptr,
          "Session::resume needs a Checkpoints hook; add it with use() first");
  require(is_before_begin(), "Session::resume belongs before the first begin");
  start();
  const std::vector<double> of_program = base_rates();
  const std::optional<int64_t> step = parts_.load_checkpoint(options.step());
  if (step) settle_rates(of_program, options.learning_rates());
  return step;
}

// Once a checkpoint is in force.
void Session::settle_rates(const std::vector<double>& of_program, ResumedRates whose) {
  const std::vector<double> saved = base_rates();
  if (saved == of_program) return;
  require(saved.size() == of_program.size(), "the program has learning rates of ", of_program.size(),
          " parameter groups, but once the checkpoint was loaded there were ", saved.size());
  if (whose == ResumedRates::program) {
    set_base_rates(of_program);
  } else if (parts_.is_first_rank()) {
    const auto g = static_cast<size_t>(
        std::mismatch(saved.begin(), saved.end(), of_program.begin(), of_program.end()).first -
        saved.begin());
    TORCH_WARN(detail::concatenate(
        "parameter group ", g, " goes on with the learning rate ", saved[g],
        " of the checkpoint; the program "
        "says ",
        of_program[g], ", which resume(ResumeOptions().learning_rates(ResumedRates::program)) takes"));
  }
}

}  // namespace pacer
