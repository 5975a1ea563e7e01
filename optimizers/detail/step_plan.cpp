// How a plan is made. Everything that can be wrong is found before the first state is created, and no plan fits
// until this one is complete.
#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/optimizer_archive.h>
#include <pacer/optimizers/detail/state_memory.h>
#include <pacer/optimizers/detail/step_plan.h>
#include <pacer/optimizers/detail/tensor_sums.h>

namespace pacer::detail {

void StepPlan::update_only(const at::Tensor& parameter, ParameterRange range) {
  require(range.first >= 0 && range.count >= 0 && range.first + range.count <= parameter.numel(),
          traits->name, ": a parameter of ", parameter.numel(), " elements has no elements from ",
          range.first, " to ", range.first + range.count);
  const std::vector<int64_t>& bounds = range.bounds;
  require(!bounds.empty() && bounds.front() == 0 && bounds.back() == parameter.numel() &&
              std::is_sorted(bounds.begin(), bounds.end()),
          traits->name, ": the bounds of a parameter of ", parameter.numel(),
          " elements must rise from 0 to that, one more than there are ranks");
  for (const at::Tensor* own : {&range.gradient, &range.values}) {
    require(!own->defined() ||
                (own->sizes() == at::IntArrayRef(range.count) && own->is_contiguous() &&
                 own->scalar_type() == parameter.scalar_type() && own->device() == parameter.device()),
            traits->name, ": the gradient and values of ", range.count, " elements of a ",
            parameter.scalar_type(), " parameter must be dense vectors of them, on its device");
  }
  ranges_[parameter.unsafeGetTensorImpl()] = std::move(range);
}

void StepPlan::page(const Paging& paging, MakePageDevice make) {
  paging_ = paging;
  make_page_device_ = std::move(make);
}

void StepPlan::make_pager() {
  if (!paging_ || (pager && pager->where() == device)) return;
  pager.reset();  // its copies come to an end first
  pager = std::make_unique<StatePager>(*paging_, make_page_device_(device), device);
  pager->acquire();
}

void StepPlan::forget() {
  if (pager) pager->forget_plan();
  planned_groups_.clear();
  planned_parameters_.clear();
  entries.clear();
  watches.clear();
  states_end_ = nullptr;
  compressed_entries.clear();
  gapped.clear();
  tables.clear();
  taking_part.clear();
  entry_of_.clear();
  step_groups = {};
  shared_norm.reset();
  if (products) products->forget();
}

ParameterEntry StepPlan::make_entry(const RegisteredParameter& parameter,
                                    torch::optim::OptimizerParamState* state) const {
  const GroupSettings& of_group = settings[parameter.group];
  ParameterEntry entry;
  entry.parameter = parameter.tensor;
  entry.name = parameter.name;
  entry.group = parameter.group;
  const auto range = ranges_.find(parameter.key());
  entry.range = range != ranges_.end() ? range->second : ParameterRange{0, parameter.tensor.numel()};
  require(!paging_ || of_group.has_first_moment, traits->name, ": group ", parameter.group,
          " has no momentum and so no buffer that could be paged; set a momentum in every group, or make the "
          "optimizer without paged()");
  entry.amsgrad = of_group.amsgrad;
  entry.has_first_moment = of_group.has_first_moment;
  entry.has_second_moment = of_group.has_second_moment;
  entry.starts_at_gradient = of_group.starts_at_gradient;
  entry.averages_trust = of_group.averages_trust;
  entry.state_bits = of_group.state_bits;
  entry.muon = of_group.muon;
  entry.is_compressed = compressed_parameters != nullptr && of_group.compresses(parameter.tensor);
  entry.storage =
      storage_for(parameter.tensor.scalar_type(), of_group.master_weights, of_group.rounding, entry.name);
  require(entry.storage != kernels::AdamStorage::f64 || entry.state_bits == 32, "parameter ",
          parameter.in_message(),
          " is fp64, whose moments have no codes in 8 bits; put it into a group with state_bits(32)");
  const auto between_groups = [&](int64_t bound) {
    return bound % kernels::kMomentGroup != 0 && bound != entry.range.bounds.back();
  };
  require(
      entry.state_bits == 32 ||
          std::none_of(entry.range.bounds.begin(), entry.range.bounds.end(), between_groups),
      traits->name, ": parameter ", parameter.in_message(),
      " was shared out between ranks for moments in 32 bits; set state_bits(8) where the optimizer is made");
  if (state == nullptr) return entry;
  entry.state = dynamic_cast<FusedAdamStateFields*>(state);
  require(entry.state != nullptr, "the state of parameter ", parameter.in_message(),
          " is another optimizer's; start from an empty state or use take_over");
  if (entry.is_compressed) return entry;  // the CompressedParameters look at it
  check_state(*entry.state, parameter.tensor.sizes(),
              entry.range.is_part() ? std::optional(entry.range.count) : std::nullopt, entry.name);
  const bool was_adamw = entry.state->exp_avg_sq().defined();
  const bool is_other =
      traits->has_matrices && entry.state->exp_avg().defined() && was_adamw == of_group.muon.has_value();
  // One without a step may be what a failure left half made.
  require(!is_other || entry.state->step() == 0, "parameter ", parameter.in_message(),
          " took its steps so far with ", was_adamw ? "AdamW's" : "Muon's",
          " rule, and the options of its group now say the other one; set orthogonalize(",
          was_adamw ? "false" : "true", "), or remove the parameter's state to begin anew");
  return entry;
}

StepPlan::AdoptedStates StepPlan::add_entries(const ParamGroups& groups, const ParamStates& states,
                                              const TensorNames& names, bool with_compressed) {
  AdoptedStates adopted;
  int64_t first_element = 0;
  size_t exchanged = 0;
  for (const RegisteredParameter& parameter : registered(groups, names)) {
    const auto owned = ranges_.find(parameter.key());
    const bool has_gradient =
        parameter.tensor.grad().defined() || (owned != ranges_.end() && owned->second.gradient.defined());
    const auto state = states.find(parameter.key());
    const bool has_state = state != states.end();
    planned_parameters_.push_back({parameter.key(), std::nullopt});
    if (has_gradient || has_state ||
        (with_compressed && settings[parameter.group].compresses(parameter.tensor)) ||
        exchanges(settings[parameter.group])) {
      planned_parameters_.back().entry = entries.size();
      torch::optim::OptimizerParamState* own = has_state ? state->second.get() : nullptr;
      if (auto of_torch = own ? adopted_state(*traits, *own) : nullptr) {
        own = of_torch.get();
        adopted.emplace_back(parameter.key(), std::move(of_torch));
      }
      entries.push_back(make_entry(parameter, own));
      if (exchanges(settings[parameter.group])) entries.back().exchanged = exchanged++;
      entries.back().first_element = first_element + entries.back().range.first;
      taking_part.push_back(takes_part(entries.back(), entries.back().gradient()));
    }
    first_element += parameter.tensor.numel();
  }
  return adopted;
}

void StepPlan::check_entries() const {
  std::vector<MemoryRange> ranges;
  std::vector<std::string> entry_names;
  for (const ParameterEntry& entry : entries) {
    const at::Tensor& gradient = entry.gradient();
    const bool reads_gradient = takes_part(entry, gradient) && gradient.defined();
    if (reads_gradient && !entry.range.gradient.defined())
      check_gradient(entry.parameter, gradient, entry.name);
    ranges.push_back(memory_range(entry.values(), entry_names.size(), /*written=*/true));
    if (reads_gradient) ranges.push_back(memory_range(gradient, entry_names.size(), /*written=*/false));
    entry_names.push_back(entry.name);
    require(!entry.range.is_part() || entry.parameter.is_contiguous(), "parameter ",
            InMessage{entry.name, entry.parameter.sizes()},
            " is updated in part, which needs its elements row by row without gaps; pass a contiguous one");
  }
  check_disjoint(ranges, entry_names);
  std::vector<const ParameterEntry*> local;
  for (const ParameterEntry& entry : entries) {
    if (entry.is_local()) local.push_back(&entry);
  }
  if (compressed_parameters != nullptr) compressed_parameters->check_fits(local);
  if (directions != nullptr) directions->check_fits(local);
}

void StepPlan::make(const ParamGroups& groups, ParamStates& states, const TensorNames& names,
                    bool with_compressed) {
  check_groups(groups, names);
  if (traits->has_matrices) check_matrices(traits->name, groups, settings, names);
  if (traits->is_onebit) check_compressible(traits->name, groups, settings, names);
  AdoptedStates adopted = add_entries(groups, states, names, with_compressed);
  check_entries();
  if (!entries.empty()) device = entries.front().parameter.device();
  refuse_capture(device);  // also refuses CUDA in a build without it
  const kernels::UpdateLoops* const loops =
      settings.empty() ? nullptr : settings[0].loops;  // all groups' or none's
  require(!device.is_cpu() || loops == nullptr || loops->cpu != nullptr, traits->name,
          ": its rule has no loop for the CPU; compile one (kernels/cpu/element_loop.h), or move the "
          "parameters to a GPU");
  require(
      device.is_cpu() || loops == nullptr || loops->cuda != nullptr, traits->name,
      ": its rule has no loop for CUDA; compile one (kernels/cuda/element_loop.cuh), or move the parameters "
      "to the CPU");
  make_pager();
  for (auto& [parameter, state] : adopted) states[parameter] = std::move(state);
  create_states(states);
  build_tables();
  for (size_t g = 0; g < groups.size(); ++g) planned_groups_.push_back(planned(groups, g));
}

void StepPlan::create_states(ParamStates& states) {
  for (ParameterEntry& entry : entries) {
    entry.lay_out();
    if (entry.state != nullptr) continue;
    auto made = traits->make_state();  // first, so that no place among the states is ever empty
    auto& state = states[entry.parameter.unsafeGetTensorImpl()] = std::move(made);
    entry.state = static_cast<FusedAdamStateFields*>(state.get());
  }
  if (!pager) return prepare_state(entries);
  pager->segments().place(entries);
  prepare_state(entries, pager->segments());
}

void StepPlan::build_tables() {
  using Key = std::tuple<kernels::AdamStorage, bool, int64_t, const kernels::UpdateLoops*,
                         std::optional<MuonSettings>>;
  std::map<Key, size_t> table_of;
  for (size_t i = 0; i < entries.size(); ++i) {
    ParameterEntry& entry = entries[i];
    entry_of_.emplace(entry.parameter.unsafeGetTensorImpl(), i);
    if (entry.is_compressed) {
      entry.position = compressed_entries.size();
      compressed_entries.push_back(i);
    } else {
      const GroupSettings& of_group = settings[entry.group];
      const auto [found, is_new] = table_of.emplace(
          Key(entry.storage, entry.amsgrad, entry.state_bits, of_group.loops, of_group.muon), tables.size());
      if (is_new) {
        tables.emplace_back(kernels::AdamLaunch{entry.storage, entry.amsgrad, false, of_group.loops},
                            of_group.kernel.rule, entry.state_bits == 8, of_group.muon,
                            exchanges(of_group) ? directions.get() : nullptr, products.get(), device);
      }
      tables[found->second].add(entry, found->second);
    }
    if (entry.dense_parameter.defined()) gapped.push_back(i);
    watches.emplace_back(entry);
  }
  int64_t units = 0;
  for (DtypeTable& table : tables) {
    table.build_tiles(/*is_paged=*/pager != nullptr);
    units += table.norm_units();
  }
  if (pager) pager->plan(entries, tables);
  if (ranks_) share_sums();
  partials = at::empty({units}, at::TensorOptions().dtype(at::kDouble).device(device));
}

// In the order in which one rank adds up all of them: table by table; the CompressedParameters add up their
// own. A parameter that was not shared out takes part in no step.
void StepPlan::share_sums() {
  shared_norm = std::make_unique<SharedNorm>(ranks_, device);
  const std::vector<int64_t> nothing(static_cast<size_t>(ranks_->world_size()) + 1);
  for (size_t t = 0; t < tables.size(); ++t) {
    std::vector<std::vector<int64_t>> bounds;
    for (const ParameterEntry& entry : entries) {
      if (entry.table != t || entry.is_compressed) continue;
      const bool is_shared = entry.range.gradient.defined();
      bounds.push_back(is_shared ? entry.range.bounds : nothing);
      if (is_shared) shared_norm->add(gradient_type(entry.storage), entry.range.gradient, bounds.back());
    }
    tables[t].share_with(ranks_, bounds);
  }
}

double StepPlan::compressed_variance_norm() const {
  std::vector<const float*> variances;
  std::vector<int64_t> counts;
  std::vector<const ParameterEntry*> compressed;
  for (const ParameterEntry& entry : entries) {
    if (!settings[entry.group].compresses(entry.parameter)) continue;
    compressed.push_back(&entry);
    variances.push_back(entry.state->exp_avg_sq().const_data_ptr<float>());
    counts.push_back(entry.range.count);
  }
  if (compressed.empty()) return 0;
  std::optional<SharedUnits> shared;
  if (ranks_) {
    std::vector<std::vector<int64_t>> bounds;
    for (const ParameterEntry* entry : compressed) {
      require(entry->range.is_part(), "parameter ", InMessage{entry->name, entry->parameter.sizes()},
              " was not shared out between ranks, but belongs to what is compressed; leave it out of the "
              "optimizer, or give its group compress(false)");
      bounds.push_back(entry->range.bounds);
    }
    shared.emplace(ranks_, bounds, device);
  }
  const std::vector<double> sums =
      tensor_sums(Term::magnitude, variances, counts, device, shared ? &*shared : nullptr);
  std::map<const StepClock*, int64_t> steps_of;  // each is read once: that waits for a GPU
  double norm = 0;
  for (size_t i = 0; i < compressed.size(); ++i) {
    const FusedAdamStateFields& state = *compressed[i]->state;
    const auto clock = state.clock();
    const auto [steps, is_new] = steps_of.emplace(clock.get(), 0);
    if (is_new || clock == nullptr) steps->second = state.step();
    if (steps->second > 0) {
      norm += sums[i] / bias_corrections(settings[compressed[i]->group].kernel, steps->second).c2;
    }
  }
  return norm;
}

}  // namespace pacer::detail
