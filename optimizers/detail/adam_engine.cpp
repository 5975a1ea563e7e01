#include <pacer/optimizers/detail/adam_engine.h>

#include <map>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/core/error.h>
#include <pacer/core/reduction_order.h>

namespace pacer::detail {

void AdamEngine::read_settings(const Groups& groups) {
  settings_.clear();
  for (const auto& group : groups) settings_.push_back(flavour_->settings(group.options()));
  check_alike(settings_, flavour_->name);
  finite_check_ = !settings_.empty() && settings_[0].finite_check;
}

bool AdamEngine::plan_fits(const Groups& groups, const States& states) {
  if (groups.size() != group_sizes_.size()) return false;
  size_t m = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& parameters = groups[g].params();
    if (parameters.size() != group_sizes_[g]) return false;
    for (const at::Tensor& parameter : parameters) {
      const Member& member = members_[m++];
      if (parameter.unsafeGetTensorImpl() != member.tensor) return false;
      const at::Tensor& gradient = parameter.grad();
      if (member.entry < 0) {
        if (gradient.defined()) return false;
        continue;
      }
      const auto i = static_cast<size_t>(member.entry);
      AdamEntry& entry = entries_[i];
      const auto state = states.find(parameter.unsafeGetTensorImpl());
      if (state == states.end() || state->second.get() != entry.state || !entry.is_current()) return false;
      if (entry.amsgrad != settings_[g].amsgrad || entry.averages_trust != settings_[g].averages_trust ||
          entry.storage != storage_for(parameter.scalar_type(), settings_[g].master_weights,
                                       settings_[g].rounding, entry.name)) {
        return false;
      }
      takes_part_[i] = gradient.defined();
      if (gradient.defined()) check_gradient(parameter, gradient, entry.name);
    }
  }
  return true;
}

void AdamEngine::add_entries(const Groups& groups, States& states, const ParameterNames& names) {
  members_.clear();
  entries_.clear();
  takes_part_.clear();
  int64_t first_element = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i];
      const at::Tensor& gradient = parameter.grad();
      const auto state = states.find(parameter.unsafeGetTensorImpl());
      members_.push_back({parameter.unsafeGetTensorImpl(), -1});
      if (gradient.defined() || state != states.end()) {
        AdamEntry entry;
        entry.parameter = parameter;
        entry.name = name_of(names, parameter, g, i);
        entry.group = g;
        entry.first_element = first_element;
        entry.amsgrad = settings_[g].amsgrad;
        entry.averages_trust = settings_[g].averages_trust;
        entry.storage = storage_for(parameter.scalar_type(), settings_[g].master_weights,
                                    settings_[g].rounding, entry.name);
        if (gradient.defined()) check_gradient(parameter, gradient, entry.name);
        if (state != states.end()) {
          entry.state = dynamic_cast<FusedAdamStateFields*>(state->second.get());
          require(entry.state != nullptr, "the state of parameter ", entry.name,
                  " is another optimizer's; start from an empty state or use take_over");
          check_state(*entry.state, parameter, entry.name);
        }
        members_.back().entry = static_cast<int64_t>(entries_.size());
        entries_.push_back(std::move(entry));
        takes_part_.push_back(gradient.defined());
      }
      first_element += parameter.numel();
    }
  }
}

// Everything that can be wrong is found before the first state is created.
void AdamEngine::plan(const Groups& groups, States& states, const ParameterNames& names) {
  tables_.clear();
  group_sizes_.clear();  // no plan fits until this one is complete
  ++enqueue_version_;
  check_groups(groups, names);
  add_entries(groups, states, names);
  std::vector<MemoryRange> ranges;
  std::vector<std::string> entry_names;
  for (const AdamEntry& entry : entries_) {
    ranges.push_back(memory_range(entry.parameter, entry_names.size(), /*written=*/true));
    const at::Tensor& gradient = entry.parameter.grad();
    if (gradient.defined()) ranges.push_back(memory_range(gradient, entry_names.size(), /*written=*/false));
    entry_names.push_back(entry.name);
  }
  check_disjoint(ranges, entry_names);

  const at::Device device = entries_.empty() ? device_ : entries_.front().parameter.device();
  device_ = device;
  refuse_capture(device_);  // also refuses CUDA in a build without it
  create_states(states);
  build_tables();
  for (const auto& group : groups) group_sizes_.push_back(group.params().size());
}

void AdamEngine::create_states(States& states) {
  for (AdamEntry& entry : entries_) {
    if (!entry.parameter.is_non_overlapping_and_dense()) {
      entry.dense_parameter =
          at::empty(entry.parameter.sizes(), entry.parameter.options().requires_grad(false));
    }
    if (entry.state == nullptr) {
      auto& state = states[entry.parameter.unsafeGetTensorImpl()];
      state = flavour_->make_state();
      entry.state = static_cast<FusedAdamStateFields*>(state.get());
    }
  }
  prepare_state(entries_);
}

void AdamEngine::build_tables() {
  std::map<std::pair<kernels::AdamStorage, bool>, size_t> table_of;
  for (AdamEntry& entry : entries_) {
    const auto [found, is_new] =
        table_of.emplace(std::make_pair(entry.storage, entry.amsgrad), tables_.size());
    if (is_new) {
      tables_.emplace_back(kernels::AdamLaunch{entry.storage, entry.amsgrad},
                           settings_[entry.group].kernel.rule, device_);
    }
    tables_[found->second].add(entry, found->second);
    entry.remember();
  }
  int64_t units = 0;
  for (AdamTable& table : tables_) {
    table.build_tiles();
    units += table.norm_units();
  }
  entry_of_.clear();
  for (size_t i = 0; i < entries_.size(); ++i) {
    entry_of_.emplace(entries_[i].parameter.unsafeGetTensorImpl(), i);
  }
  seen_.assign(entries_.size(), std::nullopt);
  partials_ = at::empty({units}, at::TensorOptions().dtype(at::kDouble).device(device_));
}

// The guard of a Session, or where finite_check asks for one, the optimizer's own.
void AdamEngine::choose_guard(const StepInputs& inputs) {
  std::shared_ptr<GradientGuard> guard = inputs.guard;
  if (guard == nullptr && finite_check_) {
    if (own_guard_ == nullptr || own_guard_->device() != device_) {
      own_guard_ = std::make_shared<GradientGuard>(device_);
    }
    guard = own_guard_;
  }
  require(guard == nullptr || guard->device() == device_, flavour_->name, ": the gradient guard is on ",
          guard ? guard->device().str() : "", " but the parameters are on ", device_.str());
  if (guard == guard_ && inputs.average == average_) return;
  guard_ = std::move(guard);
  average_ = inputs.average;
  ++enqueue_version_;
}

void AdamEngine::find_gradients() {
  for (size_t i = 0; i < entries_.size(); ++i) {
    AdamEntry& entry = entries_[i];
    const void* pointer = nullptr;
    if (takes_part_[i]) {
      const at::Tensor& gradient = entry.parameter.grad();
      entry.gradient_is_dense = !needs_dense_gradient(entry, gradient);
      if (!entry.gradient_is_dense && !entry.dense_gradient.defined()) {
        entry.dense_gradient =
            at::empty_strided(entry.memory().sizes(), entry.memory().strides(), gradient.options());
      }
      if (!entry.gradient_is_dense) ++enqueue_version_;  // a captured copy would read the former address
      pointer = (entry.gradient_is_dense ? gradient : entry.dense_gradient).const_data_ptr();
    }
    tables_[entry.table].set_gradient(entry, pointer);
  }
}

// Fills the partial sums and returns how many they are.
int64_t AdamEngine::add_squares() {
  auto* partials = static_cast<double*>(partials_.mutable_data_ptr());
  int64_t offset = 0;
  for (AdamTable& table : tables_) {
    table.sum_of_squares(partials + offset);
    offset += table.norm_units();
  }
  return offset;
}

bool AdamEngine::gradients_are_finite() {
  const int64_t count = take_early_look() ? partials_.numel() : add_squares();
  guard_->look(partials_.const_data_ptr<double>(), count, average_);
  return device_.is_cuda() || guard_->check()->non_finite == 0;  // on CUDA only the device knows
}

void AdamEngine::prepare(Groups& groups, States& states, const ParameterNames& names,
                         const StepInputs& inputs) {
  can_look_early_ = false;
  read_settings(groups);
  if (!plan_fits(groups, states)) plan(groups, states, names);
  if (entries_.empty()) return;
  const c10::DeviceGuard device_guard(device_);
  choose_guard(inputs);
  if (!slots_.fit(entries_, takes_part_)) {
    refuse_capture(device_);
    slots_.assign(entries_, takes_part_, device_);
    ++enqueue_version_;
  }
  for (AdamGroupSettings& settings : settings_) settings.kernel.factor = guard_ ? 1.0 : average_;
  slots_.configure(settings_, entries_, takes_part_);
  find_gradients();
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (takes_part_[i] && entries_[i].was_written()) follow_parameter(entries_[i]);
  }
  for (AdamTable& table : tables_) table.send(/*with_units=*/guard_ != nullptr);
  slots_.send(device_);
  if (device_.is_cuda() && (guard_ || inputs.replayable || is_capturing(device_))) slots_.let_device_lead();
  can_look_early_ = guard_ != nullptr && !inputs.replayable;
}

void AdamEngine::gather_gradients() {
  for (size_t i = 0; i < entries_.size(); ++i) {
    AdamEntry& entry = entries_[i];
    if (takes_part_[i] && !entry.gradient_is_dense) entry.dense_gradient.copy_(entry.parameter.grad());
  }
}

void AdamEngine::sum_of_squares(double* sum) {
  if (entries_.empty()) return;
  const c10::DeviceGuard device_guard(device_);
  gather_gradients();
  const int64_t count = add_squares();
  const auto* partials = partials_.const_data_ptr<double>();
  if (device_.is_cuda()) {
    kernels::sum_partials_cuda(partials, count, sum, current_stream(device_));
  } else {
    *sum = sum_partials(partials, count);
  }
}

bool AdamEngine::enqueue(bool has_looked) {
  if (entries_.empty()) return false;
  const c10::DeviceGuard device_guard(device_);
  if (!has_looked) {
    gather_gradients();
    if (guard_ && !gradients_are_finite()) return false;
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    AdamEntry& entry = entries_[i];
    if (takes_part_[i] && entry.dense_parameter.defined()) entry.dense_parameter.copy_(entry.parameter);
  }
  const void* scalars = slots_.write_scalars(device_, guard_ ? guard_->check() : nullptr);
  for (AdamTable& table : tables_) table.step(scalars, &table == &tables_.front());
  for (size_t i = 0; i < entries_.size(); ++i) {
    AdamEntry& entry = entries_[i];
    if (takes_part_[i] && entry.dense_parameter.defined()) entry.parameter.copy_(entry.dense_parameter);
  }
  return true;
}

void AdamEngine::conclude(bool applied) {
  seen_.assign(entries_.size(), std::nullopt);
  if (!applied) return;
  slots_.count_step();
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!takes_part_[i]) continue;
    AdamEntry& entry = entries_[i];
    entry.parameter.unsafeGetTensorImpl()->bump_version();
    entry.remember_version();
  }
}

int64_t AdamEngine::skipped_steps() const {
  int64_t skipped = own_guard_ ? own_guard_->read().skipped_steps : 0;
  if (guard_ && guard_ != own_guard_) skipped += guard_->read().skipped_steps;
  return skipped;
}

double AdamEngine::trust_ratio(const at::Tensor& parameter) const {
  if (group_sizes_.empty()) return 1;  // there is no plan
  for (const AdamEntry& entry : entries_) {
    if (entry.parameter.is_same(parameter)) return tables_[entry.table].trust_ratio(entry.position);
  }
  return 1;
}

}  // namespace pacer::detail
