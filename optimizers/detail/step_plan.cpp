// What a StepEngine knows beforehand of its steps: which parameters there are, where they and their states
// lie, and which tables update them. Everything that can be wrong is found before the first state is created.
#include <algorithm>
#include <map>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/optimizer_archive.h>
#include <pacer/optimizers/detail/state_memory.h>
#include <pacer/optimizers/detail/step_engine.h>
#include <pacer/optimizers/detail/tensor_sums.h>

namespace pacer::detail {

void StepEngine::own_range(const at::Tensor& parameter, OwnedRange owned) {
  const ElementRange& range = owned.range;
  require(range.first >= 0 && range.count >= 0 && range.first + range.count <= parameter.numel(),
          traits_->name, ": a parameter of ", parameter.numel(), " elements has no elements from ",
          range.first, " to ", range.first + range.count);
  const std::vector<int64_t>& bounds = owned.bounds;
  require(bounds.empty() || (bounds.front() == 0 && bounds.back() == parameter.numel() &&
                             std::is_sorted(bounds.begin(), bounds.end())),
          traits_->name, ": the bounds of a parameter of ", parameter.numel(),
          " elements must rise from 0 to that, one more than there are ranks");
  for (const at::Tensor* own : {&owned.gradient, &owned.values}) {
    require(!own->defined() ||
                (own->sizes() == at::IntArrayRef(range.count) && own->is_contiguous() &&
                 own->scalar_type() == parameter.scalar_type() && own->device() == parameter.device()),
            traits_->name, ": the gradient and values of ", range.count, " elements of a ",
            parameter.scalar_type(), " parameter must be dense vectors of them, on its device");
  }
  ranges_[parameter.unsafeGetTensorImpl()] = std::move(owned);
  forget_plan();
}

void StepEngine::page(const Paging& paging, MakePageDevice make) {
  paging_ = paging;
  make_page_device_ = std::move(make);
  forget_plan();
}

// Before a step, and before anything is changed.
void StepEngine::check_paging(const StepInputs& inputs) const {
  for (size_t g = 0; g < settings_.size(); ++g) {
    require(!settings_[g].paging || settings_[g].paging == paging_, traits_->name, ": the options of group ",
            g, paging_ ? " have another paged() than" : " have paged(), which lacks in",
            " those that the optimizer was made with; it is about the whole optimizer, so set it there");
  }
  const bool is_captured = pager_ && device_.is_cuda() && is_capturing(device_);
  require(
      !paging_ || !(inputs.replayable || is_captured), traits_->name,
      ": paged state moves between host and GPU in every step, which a CUDA graph cannot replay; leave out "
      "the CudaGraph hook, or paged()");
}

void StepEngine::make_pager() {
  if (!paging_ || (pager_ && pager_->where() == device_)) return;
  pager_.reset();  // its copies come to an end first
  pager_ = std::make_unique<StatePager>(*paging_, make_page_device_(device_), device_);
  pager_->acquire();
}

void StepEngine::expect_step() {
  if (!pager_ || planned_groups_.empty() || (device_.is_cuda() && is_capturing(device_))) return;
  const c10::DeviceGuard device_guard(device_);
  pager_->release();  // of a step that was prepared and never enqueued
  pager_->prefetch();
}

void StepEngine::forget_plan() {
  if (pager_) pager_->forget_plan();
  planned_groups_.clear();
  planned_parameters_.clear();
  entries_.clear();
  watches_.clear();
  states_end_ = nullptr;
  compressed_entries_.clear();
  gapped_.clear();
  tables_.clear();
  takes_part_.clear();
  seen_.clear();
  has_seen_ = false;
  entry_of_.clear();
  step_groups_ = {};
  shared_norm_.reset();
  can_look_early_ = false;
  ++enqueue_version_;
}

void StepEngine::compress_with(std::unique_ptr<CompressedParameters> parameters) {
  compressed_parameters_ = std::move(parameters);
  forget_plan();
}

void StepEngine::complete_compressed(const ParamGroups& groups, std::vector<GroupSettings> settings,
                                     ParamStates& states, const TensorNames& names) {
  settings_ = std::move(settings);
  plan(groups, states, names, /*with_compressed=*/true);
}

double StepEngine::compressed_variance_norm() const {
  std::vector<const float*> variances;
  std::vector<int64_t> counts;
  std::vector<const ParameterEntry*> compressed;
  for (const ParameterEntry& entry : entries_) {
    if (!settings_[entry.group].compresses(entry.parameter)) continue;
    compressed.push_back(&entry);
    variances.push_back(entry.state->exp_avg_sq().const_data_ptr<float>());
    counts.push_back(entry.range.count);
  }
  if (compressed.empty()) return 0;
  std::optional<SharedUnits> shared;
  if (ranks_) {
    std::vector<std::vector<int64_t>> bounds;
    for (const ParameterEntry* entry : compressed) {
      bounds.push_back(ranges_.at(entry->parameter.unsafeGetTensorImpl()).bounds);
    }
    shared.emplace(ranks_, bounds, device_);
  }
  const std::vector<double> sums =
      tensor_sums(Term::magnitude, variances, counts, device_, shared ? &*shared : nullptr);
  std::map<const StepClock*, int64_t> steps_of;  // each is read once: that waits for a GPU
  double norm = 0;
  for (size_t i = 0; i < compressed.size(); ++i) {
    const FusedAdamStateFields& state = *compressed[i]->state;
    const auto clock = state.clock();
    const auto [steps, is_new] = steps_of.emplace(clock.get(), 0);
    if (is_new || clock == nullptr) steps->second = state.step();
    if (steps->second > 0) {
      norm += sums[i] / bias_corrections(settings_[compressed[i]->group].kernel, steps->second).c2;
    }
  }
  return norm;
}

ParameterEntry StepEngine::make_entry(const RegisteredParameter& parameter,
                                      torch::optim::OptimizerParamState* state) const {
  const GroupSettings& settings = settings_[parameter.group];
  ParameterEntry entry;
  entry.parameter = parameter.tensor;
  entry.name = parameter.name;
  entry.group = parameter.group;
  const auto range = ranges_.find(parameter.key());
  entry.is_part = range != ranges_.end();
  entry.range = entry.is_part ? range->second.range : ElementRange{0, parameter.tensor.numel()};
  if (entry.is_part) {
    entry.own_gradient = range->second.gradient;
    entry.own_values = range->second.values;
  }
  entry.amsgrad = settings.amsgrad;
  entry.averages_trust = settings.averages_trust;
  entry.is_compressed = compressed_parameters_ != nullptr && settings.compresses(parameter.tensor);
  entry.storage =
      storage_for(parameter.tensor.scalar_type(), settings.master_weights, settings.rounding, entry.name);
  if (state == nullptr) return entry;
  entry.state = dynamic_cast<FusedAdamStateFields*>(state);
  require(entry.state != nullptr, "the state of parameter ", parameter.in_message(),
          " is another optimizer's; start from an empty state or use take_over");
  if (entry.is_compressed) return entry;  // the CompressedParameters look at it
  check_state(*entry.state, entry.is_part ? at::IntArrayRef(entry.range.count) : parameter.tensor.sizes(),
              entry.name);
  return entry;
}

StepEngine::AdoptedStates StepEngine::add_entries(const ParamGroups& groups, const ParamStates& states,
                                                  const TensorNames& names, bool with_compressed) {
  AdoptedStates adopted;
  int64_t first_element = 0;
  for (const RegisteredParameter& parameter : registered(groups, names)) {
    const auto owned = ranges_.find(parameter.key());
    const bool has_gradient =
        parameter.tensor.grad().defined() || (owned != ranges_.end() && owned->second.gradient.defined());
    const auto state = states.find(parameter.key());
    const bool has_state = state != states.end();
    planned_parameters_.push_back({parameter.key(), -1});
    if (has_gradient || has_state ||
        (with_compressed && settings_[parameter.group].compresses(parameter.tensor))) {
      planned_parameters_.back().entry = static_cast<int64_t>(entries_.size());
      torch::optim::OptimizerParamState* own = has_state ? state->second.get() : nullptr;
      if (auto of_torch = own ? adopted_state(*traits_, *own) : nullptr) {
        own = of_torch.get();
        adopted.emplace_back(parameter.key(), std::move(of_torch));
      }
      entries_.push_back(make_entry(parameter, own));
      entries_.back().first_element = first_element + entries_.back().range.first;
      takes_part_.push_back(takes_part(entries_.back(), entries_.back().gradient()));
    }
    first_element += parameter.tensor.numel();
  }
  return adopted;
}

void StepEngine::check_entries() const {
  std::vector<MemoryRange> ranges;
  std::vector<std::string> entry_names;
  for (const ParameterEntry& entry : entries_) {
    const at::Tensor& gradient = entry.gradient();
    const bool reads_gradient = takes_part(entry, gradient) && gradient.defined();
    if (reads_gradient && !entry.own_gradient.defined())
      check_gradient(entry.parameter, gradient, entry.name);
    ranges.push_back(memory_range(entry.values(), entry_names.size(), /*written=*/true));
    if (reads_gradient) ranges.push_back(memory_range(gradient, entry_names.size(), /*written=*/false));
    entry_names.push_back(entry.name);
    require(!entry.is_part || entry.parameter.is_contiguous(), "parameter ",
            InMessage{entry.name, entry.parameter.sizes()},
            " is updated in part, which needs its elements row by row without gaps; pass a contiguous one");
  }
  check_disjoint(ranges, entry_names);
  if (compressed_parameters_ == nullptr) return;
  std::vector<const ParameterEntry*> compressed;
  for (const ParameterEntry& entry : entries_) {
    if (entry.is_compressed) compressed.push_back(&entry);
  }
  compressed_parameters_->check_fits(compressed);
}

void StepEngine::plan(const ParamGroups& groups, ParamStates& states, const TensorNames& names,
                      bool with_compressed) {
  forget_plan();  // no plan fits until this one is complete
  check_groups(groups, names);
  if (traits_->is_onebit) check_compressible(traits_->name, groups, settings_, names);
  AdoptedStates adopted = add_entries(groups, states, names, with_compressed);
  check_entries();
  if (!entries_.empty()) device_ = entries_.front().parameter.device();
  refuse_capture(device_);  // also refuses CUDA in a build without it
  make_pager();
  for (auto& [parameter, state] : adopted) states[parameter] = std::move(state);
  create_states(states);
  build_tables();
  for (size_t g = 0; g < groups.size(); ++g) planned_groups_.push_back(planned(groups, g));
}

void StepEngine::create_states(ParamStates& states) {
  for (ParameterEntry& entry : entries_) {
    entry.lay_out();
    if (entry.state != nullptr) continue;
    auto made = traits_->make_state();  // first, so that no place among the states is ever empty
    auto& state = states[entry.parameter.unsafeGetTensorImpl()] = std::move(made);
    entry.state = static_cast<FusedAdamStateFields*>(state.get());
  }
  if (!pager_) return prepare_state(entries_);
  pager_->segments().place(entries_);
  prepare_state(entries_, pager_->segments());
}

void StepEngine::build_tables() {
  std::map<std::pair<kernels::AdamStorage, bool>, size_t> table_of;
  for (size_t i = 0; i < entries_.size(); ++i) {
    ParameterEntry& entry = entries_[i];
    entry_of_.emplace(entry.parameter.unsafeGetTensorImpl(), i);
    if (entry.is_compressed) {
      entry.position = compressed_entries_.size();
      compressed_entries_.push_back(i);
    } else {
      const auto [found, is_new] =
          table_of.emplace(std::make_pair(entry.storage, entry.amsgrad), tables_.size());
      if (is_new) {
        tables_.emplace_back(kernels::AdamLaunch{entry.storage, entry.amsgrad},
                             settings_[entry.group].kernel.rule, device_);
      }
      tables_[found->second].add(entry, found->second);
    }
    if (entry.dense_parameter.defined()) gapped_.push_back(i);
    watches_.emplace_back(entry);
  }
  int64_t units = 0;
  for (DtypeTable& table : tables_) {
    table.build_tiles(/*is_paged=*/pager_ != nullptr);
    units += table.norm_units();
  }
  if (pager_) pager_->plan(entries_, tables_);
  if (ranks_) share_sums();
  seen_.assign(entries_.size(), SeenTensor());
  partials_ = at::empty({units}, at::TensorOptions().dtype(at::kDouble).device(device_));
}

// In the order in which one rank adds up all of them: table by table; the CompressedParameters add up their
// own. A parameter that was not shared out takes part in no step.
void StepEngine::share_sums() {
  shared_norm_ = std::make_unique<SharedNorm>(ranks_, device_);
  const std::vector<int64_t> nothing(static_cast<size_t>(ranks_->world_size()) + 1);
  for (size_t t = 0; t < tables_.size(); ++t) {
    std::vector<std::vector<int64_t>> bounds;
    for (const ParameterEntry& entry : entries_) {
      if (entry.table != t || entry.is_compressed) continue;
      const bool is_shared = entry.own_gradient.defined();
      bounds.push_back(is_shared ? ranges_.at(entry.parameter.unsafeGetTensorImpl()).bounds : nothing);
      if (is_shared) shared_norm_->add(gradient_type(entry.storage), entry.own_gradient, bounds.back());
    }
    tables_[t].share_with(ranks_, bounds);
  }
}

}  // namespace pacer::detail
