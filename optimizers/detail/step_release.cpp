#include <pacer/optimizers/detail/step_release.h>

#include <algorithm>
#include <utility>

#include <ATen/ops/record_stream.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/detail/step_engine.h>

namespace pacer::detail {
namespace {

// Parameters without state wait until together they have one of so many of all elements.
constexpr int64_t kWaitingShare = 16;

c10::Stream stream_now(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// While it lives, the stream is the current one, behind what the current one has now.
class BehindCurrentStream {
 public:
  explicit BehindCurrentStream(const std::optional<c10::Stream>& stream) {
    if (!stream) return;
    const c10::Stream now = stream_now(stream->device());
    if (now == *stream) return;
    c10::Event is_there(stream->device_type());
    is_there.record(now);
    is_there.block(*stream);
    guard_.reset_stream(*stream);
  }

 private:
  c10::OptionalStreamGuard guard_;
};

}  // namespace

void StepEngine::begin_release(const ParamGroups& groups, std::vector<GroupSettings> settings,
                               ParamStates& states, const TensorNames& names, const StepInputs& inputs) {
  plan_.settings = std::move(settings);
  early_look_.allow(false);
  if (plan_.fits(groups, states, /*finds_gradients=*/false) == StepPlan::Fit::none)
    make_plan(groups, states, names, /*with_compressed=*/false);
  release_.begin(*this, {&groups, &states, &names, inputs.average});
}

void StepRelease::begin(StepEngine& engine, const Step& step) {
  waiting_.clear();
  waiting_elements_ = 0;
  elements_ = 0;
  stream_.reset();
  for (const auto& group : *step.groups) {
    for (const at::Tensor& parameter : group.params()) {
      elements_ += parameter.numel();
      if (parameter.is_cuda() && !stream_) stream_ = stream_now(parameter.device());
    }
  }
  step_ = step;
  try {
    begin_part(engine, {});
  } catch (...) {
    step_.reset();
    throw;
  }
}

void StepRelease::forget_plan() {
  launches_.clear();
  arrived_.clear();
  scalars_ = nullptr;
}

void StepRelease::begin_part(StepEngine& engine, const ReleasedParameters& released) {
  StepPlan& plan = engine.plan_;
  if (plan.entries.empty()) return;
  const c10::DeviceGuard device_guard(plan.device);
  bool device_leads = false;
  for (size_t i = 0; i < plan.entries.size(); ++i) {
    const ParameterEntry& entry = plan.entries[i];
    plan.taking_part[i] = entry.parameter.requires_grad() && released.count(plan.watches[i].tensor) == 0;
    const auto clock = entry.state->clock();
    device_leads = device_leads || (clock != nullptr && clock->device_leads());
  }
  if (device_leads) plan.step_groups.read_counts();
  if (device_leads || !plan.step_groups.fit(plan.entries, plan.taking_part)) {
    plan.regroup();
    ++engine.enqueue_version_;
  }
  for (GroupSettings& of_group : plan.settings) {
    of_group.kernel.factor = (of_group.maximizes ? -1.0 : 1.0) * step_->average;
  }
  plan.step_groups.configure(plan.settings, plan.local_weight(), /*guard=*/nullptr);
  plan.step_groups.send(plan.device);
  scalars_ = plan.step_groups.write_scalars(plan.device, /*check=*/nullptr);
  arrived_.assign(plan.entries.size(), 0);
  if (!launches_.empty()) return;
  for (const DtypeTable& table : plan.tables) {
    launches_.emplace_back(table.launch(), table.rule(), table.has_codes(), plan.device);
    for (size_t position = 0; position < table.tensors(); ++position) {
      launches_.back().add_launch({{position, 0, table.count(position), table.tensor(position)}});
    }
  }
}

void StepRelease::arrive(StepEngine& engine, const at::Tensor& parameter, ReleasedParameters& released) {
  const std::optional<size_t> entry = engine.plan_.find(parameter);
  require(released.count(parameter.unsafeGetTensorImpl()) == 0, "a parameter of shape ", parameter.sizes(),
          " received a second gradient in one backward pass, when GradientRelease had used the first; leave "
          "out what runs backward inside of backward, or GradientRelease");
  const c10::DeviceGuard device_guard(parameter.device());
  const BehindCurrentStream behind(stream_);
  if (entry && !arrived_.empty() && engine.plan_.taking_part[*entry]) return update(engine, *entry, released);
  waiting_.push_back(parameter);
  waiting_elements_ += parameter.numel();
  if (waiting_elements_ * kWaitingShare >= elements_) update_waiting(engine, released);
}

// What has been updated is counted, because a new plan begins with the counts of the states.
void StepRelease::update_waiting(StepEngine& engine, ReleasedParameters& released) {
  const std::vector<at::Tensor> waiting = std::exchange(waiting_, {});
  waiting_elements_ = 0;
  end_part(engine);
  engine.make_plan(*step_->groups, *step_->states, *step_->names, /*with_compressed=*/false);
  begin_part(engine, released);
  for (const at::Tensor& parameter : waiting) {
    const std::optional<size_t> entry = engine.plan_.find(parameter);
    require<Error>(entry.has_value(), "a parameter with a gradient is not in the optimizer's plan");
    update(engine, *entry, released);
  }
}

void StepRelease::update(StepEngine& engine, size_t i, ReleasedParameters& released) {
  StepPlan& plan = engine.plan_;
  ParameterEntry& entry = plan.entries[i];
  const InMessage who{entry.name, entry.parameter.sizes()};
  require(plan.watches[i].is_current(entry), "parameter ", who,
          " or its state was replaced while backward ran; change parameters between steps only");
  check_gradient(entry.parameter, gradient_of(entry.parameter), entry.name);
  launch(engine, i);
  if (stream_) gradient_of(entry.parameter).record_stream(*stream_);
  entry.dense_gradient.reset();
  entry.parameter.mutable_grad().reset();
  plan.watches[i].tensor->bump_version();  // whoever still needs the value for backward is told
  arrived_[i] = 1;
  released.insert(plan.watches[i].tensor);
}

void StepRelease::launch(StepEngine& engine, size_t i) {
  StepPlan& plan = engine.plan_;
  ParameterEntry& entry = plan.entries[i];
  if (entry.dense_parameter.defined()) entry.dense_parameter.copy_(entry.parameter);
  const void* elements = plan.find_gradient(i, /*takes_part=*/true);
  PagedTable& table = launches_[entry.table];
  table.set_gradient(entry.position, {elements, entry.step_group});
  table.send();
  if (entry.range.count > 0) table.step(entry.position, scalars_, /*follows_prologue=*/false);
  if (entry.dense_parameter.defined()) entry.parameter.copy_(entry.dense_parameter);
}

// A parameter that did not come no longer follows its step group, so the next step sorts them anew.
void StepRelease::end_part(StepEngine& engine) {
  if (arrived_.empty()) return;
  engine.plan_.step_groups.count_step();
  engine.count_states(arrived_);
  arrived_.clear();
}

void StepRelease::end(StepEngine& engine, bool has_failed, ReleasedParameters& released) {
  if (!is_under_way()) return;
  try {
    if (!has_failed && !waiting_.empty()) update_waiting(engine, released);
    end_part(engine);
  } catch (...) {
    end_part(engine);
    step_.reset();
    throw;
  }
  waiting_.clear();
  step_.reset();
}

}  // namespace pacer::detail
