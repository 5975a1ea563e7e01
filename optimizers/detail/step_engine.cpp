// A step as it runs. What the tables and step groups do in it stands here, too, so that a step reads from top
// to bottom.
#include <pacer/optimizers/detail/step_engine.h>

#include <numeric>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {

// ---- prepare: what the host does ----

void StepEngine::prepare(const ParamGroups& groups, std::vector<GroupSettings> settings, ParamStates& states,
                         const TensorNames& names, const StepInputs& inputs) {
  settings_ = std::move(settings);
  check_paging(inputs);
  if (pager_) pager_->acquire();
  try {
    prepare_step(groups, states, names, inputs);
  } catch (...) {
    if (pager_) pager_->release();
    throw;
  }
}

void StepEngine::prepare_step(const ParamGroups& groups, ParamStates& states, const TensorNames& names,
                              const StepInputs& inputs) {
  can_look_early_ = false;
  const Fit fit = plan_fits(groups, states, /*finds_gradients=*/true);
  if (fit == Fit::none) plan(groups, states, names, /*with_compressed=*/compressed_parameters_ != nullptr);
  if (entries_.empty()) return;
  require_shared_out();
  const c10::DeviceGuard device_guard(device_);
  choose_guard(inputs);
  if (!(fit == Fit::plan_and_step_groups ? step_groups_.fit() : step_groups_.fit(entries_, takes_part_)))
    assign_step_groups();
  for (GroupSettings& settings : settings_) settings.kernel.factor = guard_ ? 1.0 : average_;
  step_groups_.configure(settings_, compressed_parameters_ ? compressed_parameters_->local_weight() : 1.0);
  find_gradients();
  for (DtypeTable& table : tables_) table.send(/*with_units=*/guard_ != nullptr);
  if (compressed_parameters_) compressed_parameters_->prepare(settings_);
  if (pager_) pager_->prepare(tables_);
  step_groups_.send(device_);
  if (device_.is_cuda() && (guard_ || inputs.replayable || is_capturing(device_)))
    step_groups_.let_device_lead();
  can_look_early_ =
      guard_ != nullptr && !inputs.replayable && compressed_parameters_ == nullptr && ranges_.empty();
}

void StepEngine::assign_step_groups() {
  refuse_capture(device_);
  step_groups_.assign(entries_, takes_part_, device_);
  for (size_t i = 0; i < entries_.size(); ++i) watches_[i].step_group = entries_[i].step_group;
  unsettled_.resize(entries_.size());
  std::iota(unsettled_.begin(), unsettled_.end(), size_t{0});
  ++enqueue_version_;
}

// Ranks that share parameters out know of no other gradients.
void StepEngine::require_shared_out() const {
  for (size_t i = 0; ranks_ && i < entries_.size(); ++i) {
    require(!takes_part_[i] || entries_[i].range.gradient.defined(), "parameter ",
            InMessage{entries_[i].name, entries_[i].parameter.sizes()},
            " was not shared out between ranks, but has a gradient; freeze it, and clear the gradient");
  }
}

// The guard of a Session, or where finite_check asks for one, the optimizer's own.
void StepEngine::choose_guard(const StepInputs& inputs) {
  std::shared_ptr<GradientGuard> guard = inputs.guard;
  if (guard == nullptr && !settings_.empty() && settings_[0].finite_check) {
    if (own_guard_ == nullptr || own_guard_->device() != device_) {
      own_guard_ = std::make_shared<GradientGuard>(device_);
    }
    guard = own_guard_;
  }
  require(guard == nullptr || guard->device() == device_, traits_->name, ": the gradient guard is on ",
          guard ? guard->device().str() : "", " but the parameters are on ", device_.str());
  average_ = inputs.average;
  if (guard) guard->set_average(average_);
  if (guard == guard_) return;
  guard_ = std::move(guard);
  ++enqueue_version_;
}

bool StepEngine::plan_fits_next_step(const ParamGroups& groups, std::vector<GroupSettings> settings,
                                     const ParamStates& states) {
  settings_ = std::move(settings);
  return plan_fits(groups, states, /*finds_gradients=*/false) != Fit::none;
}

const kernels::StepScalars* StepEngine::prepare_ahead(double average, double local_weight, size_t first,
                                                      size_t end) {
  const c10::DeviceGuard device_guard(device_);
  std::vector<kernels::StepScalars>& scalars = scalars_ahead_.host();
  int64_t last = -1;  // step group whose scalars are there
  for (size_t at = first; at < end; ++at) {
    const size_t i = compressed_entries_[at];
    const ParameterEntry& entry = entries_[i];
    const bool takes_part = this->takes_part(entry, entry.gradient());
    if (!step_groups_.expects(entry.step_group, *entry.state, takes_part)) return nullptr;
    if (takes_part && entry.gradient().defined())
      check_gradient(entry.parameter, entry.gradient(), entry.name);
    if (entry.step_group != last) {
      last = entry.step_group;
      // The bits of a step, where the guard multiplies with the average.
      kernels::StepGroup group{settings_[entry.group].kernel, /*is_double=*/false, takes_part};
      group.settings.factor = 1.0;
      group.settings.factor *= local_weight;
      group.settings.factor *= average;
      scalars.resize(std::max(scalars.size(), static_cast<size_t>(entry.step_group) + 1));
      // Momentum does not depend on the step count.
      kernels::adam_scalars_cpu(group, /*step=*/1, scalars[static_cast<size_t>(entry.step_group)]);
    }
    compressed_parameters_->set_tensor(entry, find_gradient(i, takes_part), settings_[entry.group]);
  }
  scalars_ahead_.mark_changed();
  scalars_ahead_.send(device_);
  return scalars_ahead_.pointer();
}

// ---- enqueue: kernels ----

bool StepEngine::enqueue() {
  if (entries_.empty()) return false;
  const c10::DeviceGuard device_guard(device_);
  if (guard_ && !gradients_are_finite()) return false;
  const auto with_copies = [&](const auto& copy) {
    for (const size_t i : gapped_) {
      if (takes_part_[i]) copy(entries_[i]);
    }
  };
  with_copies([](ParameterEntry& entry) { entry.dense_parameter.copy_(entry.parameter); });
  const kernels::GradientCheck* check = guard_ ? guard_->check() : nullptr;
  const kernels::StepScalars* scalars = step_groups_.write_scalars(device_, check);
  if (compressed_parameters_) compressed_parameters_->step(scalars, check);
  if (pager_) pager_->step(scalars);
  for (DtypeTable& table : tables_) {
    if (!pager_) table.step(scalars, &table == &tables_.front() && compressed_parameters_ == nullptr);
  }
  with_copies([](ParameterEntry& entry) { entry.parameter.copy_(entry.dense_parameter); });
  return true;
}

// Fills the partial sums and returns how many they are.
int64_t StepEngine::add_squares() {
  auto* partials = static_cast<double*>(partials_.mutable_data_ptr());
  int64_t offset = 0;
  for (DtypeTable& table : tables_) {
    table.sum_of_squares(partials + offset);
    offset += table.norm_units();
  }
  return offset;
}

bool StepEngine::gradients_are_finite() {
  at::Tensor sums = partials_;
  int64_t count = 0;
  if (shared_norm_) {
    sums = shared_norm_->sums();
    count = sums.numel();
  } else {
    count = take_early_look() ? partials_.numel() : add_squares();
  }
  const auto* partials = sums.const_data_ptr<double>();
  compressed_parameters_ ? compressed_parameters_->look(*guard_, partials, count)
                         : guard_->look(partials, count);
  return device_.is_cuda() || guard_->check()->non_finite == 0;  // on CUDA only the device knows
}

const kernels::StepScalars* StepGroups::write_scalars(at::Device device,
                                                      const kernels::GradientCheck* check) {
  const std::vector<kernels::StepGroup>& groups = table_.host();
  if (device.is_cuda()) {
    auto* scalars = static_cast<kernels::StepScalars*>(device_scalars_.mutable_data_ptr());
    kernels::adam_prologue_cuda(table_.pointer(), static_cast<int64_t>(groups.size()),
                                static_cast<int64_t*>(device_steps_.mutable_data_ptr()), scalars, check,
                                current_stream(device));
    return scalars;
  }
  host_scalars_.resize(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    kernels::StepGroup group = groups[i];
    if (check) group.settings.factor *= check->factor;
    kernels::adam_scalars_cpu(group, groups_[i].clock->host_steps() + 1, host_scalars_[i]);
  }
  return host_scalars_.data();
}

void DtypeTable::step(const kernels::StepScalars* scalars, bool follows_prologue) {
  if (lamb_) {
    return lamb_->step({tensors_.pointer(), gradients_.pointer(), scalars}, tiles_.view(), follows_prologue);
  }
  if (device_.is_cuda()) {
    kernels::AdamLaunch launch = launch_;
    launch.follows_prologue = follows_prologue;
    kernels::adam_cuda(launch, tiles_.view(), tensors_.pointer(), gradients_.pointer(), scalars,
                       current_stream(device_));
    return;
  }
  for_each_tile(units_.host(), [&](int64_t i) {
    kernels::adam_cpu(launch_, units_.host()[static_cast<size_t>(i)], tensors_.host().data(),
                      gradients_.host().data(), scalars);
  });
}

// ---- conclude: the host's books ----

void StepEngine::conclude(bool applied) {
  forget_seen();
  if (pager_) pager_->release();
  if (!applied) return;
  step_groups_.count_step();
  for (size_t i = 0; i < watches_.size(); ++i) {
    if (!takes_part_[i]) continue;
    watches_[i].tensor->bump_version();
    watches_[i].state->count_step();
  }
}

int64_t StepEngine::skipped_steps() const {
  int64_t skipped = own_guard_ ? own_guard_->read().skipped_steps : 0;
  if (guard_ && guard_ != own_guard_) skipped += guard_->read().skipped_steps;
  return skipped;
}

double StepEngine::trust_ratio(const at::Tensor& parameter) const {
  const auto found = entry_of_.find(parameter.unsafeGetTensorImpl());
  if (found == entry_of_.end() || entries_[found->second].is_compressed) return 1;
  const ParameterEntry& entry = entries_[found->second];
  return pager_ ? pager_->trust_ratio(entry.table, entry.position)
                : tables_[entry.table].trust_ratio(entry.position);
}

}  // namespace pacer::detail
