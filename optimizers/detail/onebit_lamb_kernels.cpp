#include <pacer/optimizers/detail/onebit_lamb_kernels.h>

#include <cmath>

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <pacer/optimizers/detail/tensor_sums.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {
namespace {

constexpr const char* kScale = "momentum_scale";
constexpr const char* kFactor = "lamb_factor";
constexpr const char* kFresh = "fresh_variance";

std::string field_of(const std::string& name) { return name.substr(name.rfind('/') + 1); }

}  // namespace

double mean_trust(const at::Tensor& trust_average) { return trust_average.select(0, 0).item<double>(); }

double corrected_trust(const at::Tensor& trust_average, const kernels::RuleSettings& settings) {
  const at::Tensor on_host = trust_average.cpu();
  const auto* numbers = on_host.const_data_ptr<double>();
  const auto count = static_cast<int64_t>(numbers[1]);
  return count == 0 ? 1 : numbers[0] / kernels::one_minus_power(settings.coeff_beta, count);
}

bool is_lamb_number(const std::string& name) {
  const std::string field = field_of(name);
  return field == kScale || field == kFactor;
}

void cut_lamb_state(const std::vector<OneBitTensor>& tensors, const std::vector<OneBitTensor>& whole,
                    int rank, NamedTensors& state) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto found = state.find(tensors[i].name + "/" + kFresh);
    if (tensors[i].bounds.empty() || found == state.end()) continue;
    at::Tensor& fresh = found->second;
    if (fresh.sizes() != at::IntArrayRef(whole[i].sizes)) continue;
    fresh = fresh.reshape({-1}).narrow(0, tensors[i].bounds[static_cast<size_t>(rank)], tensors[i].count);
  }
}

NamedTensors take_lamb_state(NamedTensors& state) {
  NamedTensors taken;
  for (auto item = state.begin(); item != state.end();) {
    const std::string field = field_of(item->first);
    if (field == kScale || field == kFactor || field == kFresh) {
      taken.insert(*item);
      item = state.erase(item);
    } else {
      ++item;
    }
  }
  return taken;
}

OneBitLambKernels::OneBitLambKernels(const std::vector<OneBitTensor>& tensors,
                                     const kernels::OneBitLayout& layout, const std::vector<Tile>& units,
                                     at::Device device, const std::shared_ptr<Communicator>& shard_ranks)
    : tensors_(tensors), device_(device), layout_(layout) {
  const auto count = static_cast<int64_t>(tensors.size());
  const auto floats = at::TensorOptions().dtype(at::kFloat).device(device);
  const auto doubles = floats.dtype(at::kDouble);
  const auto unit_count = static_cast<int64_t>(units.size());
  fresh_variance_ = at::zeros({layout_.length()}, floats);
  momentum_scales_ = at::ones({count}, floats);
  step_sizes_ = at::zeros({count}, floats);
  coefficients_ = at::ones({count}, doubles);
  factors_ = at::ones({count}, doubles);
  ratios_ = at::empty({unit_count}, floats);
  sums_ = at::empty({2, unit_count}, doubles);
  if (shard_ranks) shared_units_ = std::make_unique<SharedUnits>(shard_ranks, bounds_of(tensors), device);
  const auto units_of = shared_units_ ? shared_units_->units_of() : tile_ranges(units, tensors.size());
  for (const TileRange& of_tensor : units_of) table_.host().push_back({of_tensor, {}});
}

void OneBitLambKernels::freeze(const OneBitStates& states, const std::vector<GroupSettings>& settings,
                               const at::Tensor& variance, const at::Tensor& momentum,
                               const at::Tensor& floors) {
  std::vector<const float*> arrays;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    arrays.push_back(momentum.const_data_ptr<float>() + layout_.offset(i));
  }
  const std::vector<double> squares =
      tensor_sums(Term::square, arrays, layout_.counts(), device_, shared_units_.get());
  const std::vector<int64_t>& counts = shared_units_ ? shared_units_->counts() : layout_.counts();
  std::vector<double> magnitudes;
  double sum = 0, counted = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto count = static_cast<double>(counts[i]);
    magnitudes.push_back(count > 0 ? std::sqrt(squares[i] / count) : 0);
    sum += magnitudes.back();
    counted += count > 0;
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const OneBitTensor& tensor = tensors_[i];
    const auto place = static_cast<int64_t>(i);
    const kernels::RuleSettings& kernel = settings[tensor.group].kernel;
    momentum_scales_.select(0, place).fill_(kernels::momentum_scale(magnitudes[i], sum / counted));
    const double c2 = kernels::bias_corrections(kernel, states[i]->step()).c2;
    const at::Tensor floored =
        at::maximum(tensor.view(variance, layout_.offset(i)), floors.select(0, place).abs());
    tensor.view(fresh_variance_, layout_.offset(i)).copy_(floored.to(at::kDouble).mul_(c2));
    const double coefficient = corrected_trust(states[i]->trust_average(), kernel);
    states[i]->trust_average().select(0, 0).fill_(coefficient);
    coefficients_.select(0, place).fill_(coefficient);
  }
}

NamedViews OneBitLambKernels::saved_views() const {
  NamedViews views;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto place = static_cast<int64_t>(i);
    const std::string prefix = tensors_[i].name + "/";
    views.emplace_back(prefix + kScale, momentum_scales_.narrow(0, place, 1));
    views.emplace_back(prefix + kFactor, factors_.narrow(0, place, 1));
    views.emplace_back(prefix + kFresh, tensors_[i].view(fresh_variance_, layout_.offset(i)));
  }
  return views;
}

void OneBitLambKernels::export_state(NamedTensors& state) const { save_views(saved_views(), state); }

void OneBitLambKernels::import_state(const OneBitStates& states, NamedTensors& state) {
  load_views(saved_views(), state,
             {"the state to load is frozen, but has no \"", "\"; load one that a OneBitLamb has saved", ""});
  for (size_t i = 0; i < tensors_.size(); ++i) {
    coefficients_.narrow(0, static_cast<int64_t>(i), 1).copy_(states[i]->trust_average().narrow(0, 0, 1));
  }
}

void OneBitLambKernels::configure(const std::vector<GroupSettings>& settings) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const kernels::LambFactorBounds& wanted = settings[tensors_[i].group].factor_bounds;
    kernels::LambFactorBounds& current = table_.host()[i].bounds;
    if (current == wanted) continue;
    current = wanted;
    table_.mark_changed();
  }
  table_.send(device_);
}

void OneBitLambKernels::unscale(const at::Tensor& flat) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].view(flat, layout_.offset(i)).div_(momentum_scales_.select(0, static_cast<int64_t>(i)));
  }
}

kernels::OneBitLambPartials OneBitLambKernels::partials() const {
  auto* sums = sums_.mutable_data_ptr<double>();
  return {ratios_.mutable_data_ptr<float>(), sums, sums + sums_.size(1)};
}

kernels::OneBitLambPartials OneBitLambKernels::all_partials(at::Tensor (&held)[2]) const {
  if (!shared_units_) return partials();
  const at::Tensor own = at::cat({ratios_.to(at::kDouble).unsqueeze(0), sums_});
  held[0] = shared_units_->gather(own);
  held[1] = held[0].select(0, 0).to(at::kFloat);
  auto* sums = held[0].mutable_data_ptr<double>();
  const int64_t units = held[0].size(1);
  return {held[1].mutable_data_ptr<float>(), sums + units, sums + 2 * units};
}

void OneBitLambKernels::step(const std::vector<OneBitTable>& tables, const std::vector<Tile>& units,
                             const kernels::OneBitAdamWork& now, const Before& before, bool dense,
                             const kernels::OneBitControl& control) const {
  kernels::OneBitLambWork work{};
  work.now = now;
  work.dense_before = before.dense;
  work.bits_before = before.bits;
  work.before = before.status;
  work.fresh_variance = fresh_variance_.mutable_data_ptr<float>();
  work.tensors = table_.pointer();
  work.coefficients = coefficients_.const_data_ptr<double>();
  work.factors = factors_.mutable_data_ptr<double>();
  work.step_sizes = step_sizes_.mutable_data_ptr<float>();
  work.partials = partials();
  at::Tensor held[2];
  const auto tensors = static_cast<int64_t>(table_.host().size());
  if (device_.is_cuda()) {
    const kernels::Stream stream = current_stream(device_);
    for (const OneBitTable& table : tables) {
      onebit_lamb_moments_cuda(table.storage, table.units.pointer(), table.unit_places.pointer(),
                               static_cast<int64_t>(table.units.host().size()), work, dense, control, stream);
    }
    work.partials = all_partials(held);
    onebit_lamb_factors_cuda(tensors, work, control, stream);
    for (const OneBitTable& table : tables) {
      onebit_lamb_update_cuda(table.storage, table.tiles.view(), work, dense, control, stream);
    }
    return;
  }
  for_each_tile(units, [&](int64_t u) { onebit_lamb_moments_cpu(work, units[static_cast<size_t>(u)], u); });
  work.partials = all_partials(held);
  for (int64_t tensor = 0; tensor < tensors; ++tensor) onebit_lamb_factor_cpu(work, tensor);
  for_each_tile(units, [&](int64_t u) { onebit_lamb_update_cpu(work, units[static_cast<size_t>(u)]); });
}

}  // namespace pacer::detail
