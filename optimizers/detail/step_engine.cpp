#include <pacer/optimizers/detail/step_engine.h>

#include <algorithm>

#include <c10/core/DeviceGuard.h>

#include <pacer/core/error.h>

namespace pacer::detail {

// ---- The plan. ----

void StepEngine::make_plan(const ParamGroups& groups, ParamStates& states, const TensorNames& names,
                           bool with_compressed) {
  forget_plan();
  plan_.make(groups, states, names, with_compressed);
}

void StepEngine::forget_plan() {
  plan_.forget();
  release_.forget_plan();
  early_look_.forget();
  early_look_.allow(false);
  ++enqueue_version_;
}

void StepEngine::complete_compressed(const ParamGroups& groups, std::vector<GroupSettings> settings,
                                     ParamStates& states, const TensorNames& names) {
  plan_.settings = std::move(settings);
  make_plan(groups, states, names, /*with_compressed=*/true);
}

bool StepEngine::plan_fits_next_step(const ParamGroups& groups, std::vector<GroupSettings> settings,
                                     const ParamStates& states) {
  plan_.settings = std::move(settings);
  return plan_.fits(groups, states, /*finds_gradients=*/false) != StepPlan::Fit::none;
}

// What buckets of compressed parameters start with while backward runs.
const kernels::StepScalars* StepEngine::prepare_ahead(double average, double local_weight, size_t first,
                                                      size_t end) {
  const c10::DeviceGuard device_guard(plan_.device);
  std::vector<kernels::StepScalars>& scalars = ahead_.host();
  std::optional<int64_t> last;  // the step group whose scalars are there
  for (size_t at = first; at < end; ++at) {
    const size_t i = plan_.compressed_entries[at];
    const ParameterEntry& entry = plan_.entries[i];
    const GroupSettings& settings = plan_.settings[entry.group];
    const bool takes_part = plan_.takes_part(entry, entry.gradient());
    if (!plan_.step_groups.expects(entry.step_group, *entry.state, takes_part)) return nullptr;
    if (takes_part && entry.gradient().defined())
      check_gradient(entry.parameter, entry.gradient(), entry.name);
    if (entry.step_group != last) {
      last = entry.step_group;
      // The bits of a step, where the guard multiplies with the average.
      kernels::StepGroup group{settings.kernel, /*is_double=*/false, takes_part};
      group.settings.factor = 1.0;
      group.settings.factor *= local_weight;
      group.settings.factor *= average;
      scalars.resize(std::max(scalars.size(), static_cast<size_t>(entry.step_group) + 1));
      // Momentum does not depend on the step count.
      kernels::adam_scalars_cpu(group, /*step=*/1, scalars[static_cast<size_t>(entry.step_group)]);
    }
    plan_.compressed_parameters->set_tensor(entry, plan_.find_gradient(i, takes_part), settings);
  }
  ahead_.mark_changed();
  ahead_.send(plan_.device);
  return ahead_.pointer();
}

// ---- prepare: what the host does ----

void StepEngine::expect_step() {
  if (!plan_.pager || !plan_.is_made() || (plan_.device.is_cuda() && is_capturing(plan_.device))) return;
  const c10::DeviceGuard device_guard(plan_.device);
  plan_.pager->release();  // of a step that was prepared and never enqueued
  plan_.pager->prefetch();
}

void StepEngine::prepare(const ParamGroups& groups, std::vector<GroupSettings> settings, ParamStates& states,
                         const TensorNames& names, const StepInputs& inputs) {
  plan_.settings = std::move(settings);
  plan_.check_paging(inputs);
  if (plan_.pager) plan_.pager->acquire();
  try {
    prepare_step(groups, states, names, inputs);
  } catch (...) {
    if (plan_.pager) plan_.pager->release();
    throw;
  }
}

void StepEngine::prepare_step(const ParamGroups& groups, ParamStates& states, const TensorNames& names,
                              const StepInputs& inputs) {
  early_look_.allow(false);
  const StepPlan::Fit fit = plan_.fits(groups, states, /*finds_gradients=*/true);
  if (fit == StepPlan::Fit::none)
    make_plan(groups, states, names, /*with_compressed=*/plan_.compressed_parameters != nullptr);
  if (plan_.entries.empty()) return;
  plan_.require_shared_out();
  const c10::DeviceGuard device_guard(plan_.device);
  choose_guard(inputs);
  const bool groups_fit = fit == StepPlan::Fit::plan_and_step_groups
                              ? plan_.step_groups.may_stay()
                              : plan_.step_groups.fit(plan_.entries, plan_.taking_part);
  if (!groups_fit) {
    plan_.regroup();
    ++enqueue_version_;
  }
  for (GroupSettings& of_group : plan_.settings) {
    of_group.kernel.factor = (of_group.maximizes ? -1.0 : 1.0) * (guard_ ? 1.0 : average_);
  }
  plan_.step_groups.configure(plan_.settings, plan_.local_weight(), guard_.get());
  plan_.find_gradients();
  if (!visible_rows_.stay_all() &&
      visible_rows_.give(*plan_.traits, plan_.settings, plan_.entries, plan_.tables)) {
    ++enqueue_version_;
  }
  if (plan_.products) plan_.products->agree(plan_.entries, plan_.taking_part);
  for (DtypeTable& table : plan_.tables) table.send(/*with_units=*/guard_ != nullptr);
  if (plan_.compressed_parameters) plan_.compressed_parameters->prepare(plan_.settings);
  if (plan_.pager) plan_.pager->prepare(plan_.tables);
  if (plan_.device.is_cuda()) {
    plan_.step_groups.send(plan_.device);
    if (guard_ || inputs.replayable || is_capturing(plan_.device)) plan_.step_groups.let_device_lead();
  }
  early_look_.allow(guard_ != nullptr && !inputs.replayable && plan_.compressed_parameters == nullptr &&
                    plan_.directions == nullptr && plan_.ranges().empty());
}

// The guard of a Session, or where finite_check asks for one, the optimizer's own.
void StepEngine::choose_guard(const StepInputs& inputs) {
  std::shared_ptr<GradientGuard> guard = inputs.guard;
  if (guard == nullptr && !plan_.settings.empty() && plan_.settings[0].finite_check) {
    if (own_guard_ == nullptr || own_guard_->device() != plan_.device) {
      own_guard_ = std::make_shared<GradientGuard>(plan_.device);
    }
    guard = own_guard_;
  }
  require(guard == nullptr || guard->device() == plan_.device, plan_.traits->name,
          ": the gradient guard is on ", guard ? guard->device().str() : "", " but the parameters are on ",
          plan_.device.str());
  average_ = inputs.average;
  if (guard) guard->set_average(average_);
  if (guard == guard_) return;
  guard_ = std::move(guard);
  ++enqueue_version_;
}

// ---- enqueue: kernels ----

// Where there is no memory for matrices the step was not taken: nothing else has changed yet.
const kernels::StepScalars* StepEngine::begin_update(const kernels::GradientCheck* check, bool has_matrices) {
  const at::Tensor counts = has_matrices ? plan_.step_groups.copy_of_counts(plan_.device) : at::Tensor();
  const kernels::StepScalars* scalars = plan_.step_groups.write_scalars(plan_.device, check);
  try {
    for (DtypeTable& table : plan_.tables) table.orthogonalize(scalars);
    if (plan_.directions) {
      plan_.directions->average(check);
      for (DtypeTable& table : plan_.tables) table.take_mean(scalars);
    }
  } catch (...) {
    plan_.step_groups.take_back(counts);
    throw;
  }
  return scalars;
}

bool StepEngine::enqueue() {
  if (plan_.entries.empty()) return false;
  const c10::DeviceGuard device_guard(plan_.device);
  if (guard_ && !gradients_are_finite()) return false;
  const auto with_copies = [&](const auto& copy) {
    for (const size_t i : plan_.gapped) {
      if (plan_.taking_part[i]) copy(plan_.entries[i]);
    }
  };
  with_copies([](ParameterEntry& entry) { entry.dense_parameter.copy_(entry.parameter); });
  const kernels::GradientCheck* check = guard_ ? guard_->check() : nullptr;
  const bool has_matrices = std::any_of(plan_.tables.begin(), plan_.tables.end(),
                                        [](const DtypeTable& table) { return table.has_matrices(); });
  const kernels::StepScalars* scalars = begin_update(check, has_matrices);
  if (plan_.compressed_parameters) plan_.compressed_parameters->step(scalars, check);
  if (plan_.pager) plan_.pager->step(scalars);
  for (DtypeTable& table : plan_.tables) {
    if (!plan_.pager)
      table.step(scalars,
                 &table == &plan_.tables.front() && plan_.compressed_parameters == nullptr && !has_matrices);
  }
  with_copies([](ParameterEntry& entry) { entry.parameter.copy_(entry.dense_parameter); });
  return true;
}

// Fills the partial sums of the tables for which which(table) is true, from there on, and returns their end.
template <class Which>
int64_t StepEngine::add_squares(int64_t offset, const Which& which) {
  auto* partials = static_cast<double*>(plan_.partials.mutable_data_ptr());
  for (DtypeTable& table : plan_.tables) {
    if (!which(table)) continue;
    table.sum_of_squares(partials + offset);
    offset += table.norm_units();
  }
  return offset;
}

bool StepEngine::gradients_are_finite() {
  at::Tensor sums = plan_.partials;
  int64_t count = 0;
  if (plan_.directions) {
    const int64_t own = add_squares(0, [](const DtypeTable& table) { return table.has_matrices(); });
    count = add_squares(own, [](const DtypeTable& table) { return !table.has_matrices(); }) - own;
    const auto* partials = sums.const_data_ptr<double>();
    plan_.directions->look(*guard_, partials, own, partials + own, count);
    return plan_.device.is_cuda() || guard_->check()->non_finite == 0;
  }
  if (plan_.shared_norm) {
    sums = plan_.shared_norm->sums();
    count = sums.numel();
  } else {
    count = early_look_.take(plan_) ? plan_.partials.numel()
                                    : add_squares(0, [](const DtypeTable&) { return true; });
  }
  const auto* partials = sums.const_data_ptr<double>();
  plan_.compressed_parameters ? plan_.compressed_parameters->look(*guard_, partials, count)
                              : guard_->look(partials, count);
  return plan_.device.is_cuda() || guard_->check()->non_finite == 0;  // on CUDA only the device knows
}

// ---- conclude: the host's books ----

void StepEngine::conclude(bool applied) {
  early_look_.forget();
  if (plan_.pager) plan_.pager->release();
  if (!applied) return;
  plan_.step_groups.count_step();
  for (size_t i = 0; i < plan_.watches.size(); ++i) {
    if (plan_.taking_part[i]) plan_.watches[i].tensor->bump_version();
  }
  count_states(plan_.taking_part);
}

// Once their step groups have counted.
void StepEngine::count_states(const std::vector<char>& which) {
  for (size_t i = 0; i < plan_.watches.size(); ++i) {
    if (!which[i]) continue;
    plan_.watches[i].state->count_step();
    if (plan_.traits->averages) plan_.watches[i].state->note_average();
  }
}

int64_t StepEngine::skipped_steps() const {
  int64_t skipped = own_guard_ ? own_guard_->read().skipped_steps : 0;
  if (guard_ && guard_ != own_guard_) skipped += guard_->read().skipped_steps;
  return skipped;
}

double StepEngine::trust_ratio(const at::Tensor& parameter) const {
  const std::optional<size_t> found = plan_.find(parameter);
  if (!found || plan_.entries[*found].is_compressed) return 1;
  const ParameterEntry& entry = plan_.entries[*found];
  return plan_.pager ? plan_.pager->trust_ratio(entry.table, entry.position)
                     : plan_.tables[entry.table].trust_ratio(entry.position);
}

}  // namespace pacer::detail
