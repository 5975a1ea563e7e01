#include <pacer/optimizers/detail/onebit_lamb_stages.h>

#include <array>
#include <cmath>
#include <set>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/tensor_sums.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {
namespace {

constexpr const char* kScale = "/momentum_scale";
constexpr const char* kFactor = "/lamb_factor";
constexpr const char* kFresh = "/fresh_variance";

bool ends_with(const std::string& text, const std::string& ending) {
  return text.size() >= ending.size() &&
         text.compare(text.size() - ending.size(), ending.size(), ending) == 0;
}

void check_numbers(const NamedTensors& state, const std::string& key, at::ScalarType dtype,
                   at::IntArrayRef sizes) {
  require(state.count(key) != 0, "the state to load is frozen, but has no \"", key,
          "\"; load one that a OneBitLamb has saved");
  const at::Tensor& tensor = state.at(key);
  require(tensor.scalar_type() == dtype && tensor.sizes() == sizes, "\"", key, "\" of the state to load is ",
          tensor.scalar_type(), " of shape ", tensor.sizes(), ", but it must be ", dtype, " of shape ",
          sizes);
}

}  // namespace

double mean_trust(const at::Tensor& trust_average) { return trust_average.select(0, 0).item<double>(); }

double corrected_trust(const at::Tensor& trust_average, const kernels::AdamSettings& settings) {
  const at::Tensor on_host = trust_average.cpu();
  const auto* numbers = on_host.const_data_ptr<double>();
  const auto count = static_cast<int64_t>(numbers[1]);
  return count == 0 ? 1 : numbers[0] / kernels::one_minus_power(settings.coeff_beta, count);
}

NamedTensors take_lamb_state(NamedTensors& state) {
  NamedTensors taken;
  for (auto item = state.begin(); item != state.end();) {
    const std::string& key = item->first;
    if (ends_with(key, kScale) || ends_with(key, kFactor) || ends_with(key, kFresh)) {
      taken[key] = item->second;
      item = state.erase(item);
    } else {
      ++item;
    }
  }
  return taken;
}

OneBitLambStages::OneBitLambStages(const std::vector<OneBitTensor>& tensors,
                                   const kernels::OneBitLayout& layout, const std::vector<Tile>& units,
                                   at::Device device)
    : device_(device), layout_(layout) {
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
  for (const TileRange& own : tile_ranges(units, tensors.size())) tensors_.host().push_back({own, {}});
}

at::Tensor OneBitLambStages::view(const at::Tensor& flat, const OneBitTensor& tensor, size_t i) const {
  return flat.as_strided(tensor.sizes, tensor.strides, layout_.offset(i));
}

void OneBitLambStages::freeze(const std::vector<OneBitTensor>& tensors, const OneBitStates& states,
                              const std::vector<AdamGroupSettings>& settings, const at::Tensor& variance,
                              const at::Tensor& momentum, const at::Tensor& floors) {
  std::vector<const float*> arrays;
  for (size_t i = 0; i < tensors.size(); ++i) {
    arrays.push_back(momentum.const_data_ptr<float>() + layout_.offset(i));
  }
  const std::vector<double> squares = tensor_sums(Term::square, arrays, layout_.counts(), device_);
  std::vector<double> magnitudes;
  double sum = 0, counted = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto count = static_cast<double>(layout_.counts()[i]);
    magnitudes.push_back(count > 0 ? std::sqrt(squares[i] / count) : 0);
    sum += magnitudes.back();
    counted += count > 0;
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const OneBitTensor& tensor = tensors[i];
    const auto place = static_cast<int64_t>(i);
    const kernels::AdamSettings& kernel = settings[tensor.group].kernel;
    momentum_scales_.select(0, place).fill_(kernels::momentum_scale(magnitudes[i], sum / counted));
    const double c2 = kernels::bias_corrections(kernel, states[i]->step()).c2;
    const at::Tensor floored = at::maximum(view(variance, tensor, i), floors.select(0, place));
    view(fresh_variance_, tensor, i).copy_(floored.to(at::kDouble).mul_(c2));
    const double coefficient = corrected_trust(states[i]->trust_average(), kernel);
    states[i]->trust_average().select(0, 0).fill_(coefficient);
    coefficients_.select(0, place).fill_(coefficient);
  }
}

void OneBitLambStages::export_state(const std::vector<OneBitTensor>& tensors, NamedTensors& state) const {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto place = static_cast<int64_t>(i);
    state[tensors[i].name + kScale] = momentum_scales_.narrow(0, place, 1);
    state[tensors[i].name + kFactor] = factors_.narrow(0, place, 1);
    state[tensors[i].name + kFresh] = view(fresh_variance_, tensors[i], i);
  }
}

void OneBitLambStages::check_state(const std::vector<OneBitTensor>& tensors,
                                   const NamedTensors& state) const {
  std::set<std::string> expected;
  for (const OneBitTensor& tensor : tensors) {
    check_numbers(state, tensor.name + kScale, at::kFloat, {1});
    check_numbers(state, tensor.name + kFactor, at::kDouble, {1});
    check_numbers(state, tensor.name + kFresh, at::kFloat, tensor.sizes);
    expected.insert({tensor.name + kScale, tensor.name + kFactor, tensor.name + kFresh});
  }
  for (const auto& item : state) {
    require(expected.count(item.first) != 0, "the state to load has \"", item.first,
            "\", which fits no compressed parameter; build the same parameters and options");
  }
}

void OneBitLambStages::import_state(const std::vector<OneBitTensor>& tensors, const OneBitStates& states,
                                    const NamedTensors& state) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto place = static_cast<int64_t>(i);
    const OneBitTensor& tensor = tensors[i];
    momentum_scales_.narrow(0, place, 1).copy_(state.at(tensor.name + kScale));
    factors_.narrow(0, place, 1).copy_(state.at(tensor.name + kFactor));
    view(fresh_variance_, tensor, i).copy_(state.at(tensor.name + kFresh));
    coefficients_.narrow(0, place, 1).copy_(states[i]->trust_average().narrow(0, 0, 1));
  }
}

void OneBitLambStages::configure(const std::vector<OneBitTensor>& tensors,
                                 const std::vector<AdamGroupSettings>& settings) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const kernels::LambFactorBounds& wanted = settings[tensors[i].group].factor_bounds;
    kernels::LambFactorBounds& current = tensors_.host()[i].bounds;
    if (current == wanted) continue;
    current = wanted;
    tensors_.mark_changed();
  }
  tensors_.send(device_);
}

void OneBitLambStages::unscale(const std::vector<OneBitTensor>& tensors, const at::Tensor& flat) const {
  for (size_t i = 0; i < tensors.size(); ++i) {
    view(flat, tensors[i], i).div_(momentum_scales_.select(0, static_cast<int64_t>(i)));
  }
}

double OneBitLambStages::factor(size_t i) const {
  return factors_.select(0, static_cast<int64_t>(i)).item<double>();
}
double OneBitLambStages::momentum_scale(size_t i) const {
  return momentum_scales_.select(0, static_cast<int64_t>(i)).item<double>();
}

void OneBitLambStages::step(const OneBitStages& stages, const kernels::OneBitAdamWork& now,
                            const Before& before, bool dense, const kernels::OneBitControl& control) const {
  kernels::OneBitLambWork work{};
  work.now = now;
  work.dense_before = before.dense;
  work.bits_before = before.bits;
  work.before = before.status;
  work.fresh_variance = fresh_variance_.mutable_data_ptr<float>();
  work.tensors = tensors_.pointer();
  work.coefficients = coefficients_.const_data_ptr<double>();
  work.factors = factors_.mutable_data_ptr<double>();
  work.step_sizes = step_sizes_.mutable_data_ptr<float>();
  auto* sums = sums_.mutable_data_ptr<double>();
  work.partials = {ratios_.mutable_data_ptr<float>(), sums, sums + sums_.size(1)};
  const auto tensors = static_cast<int64_t>(tensors_.host().size());
  if (device_.is_cuda()) {
    const kernels::Stream stream = current_stream(device_);
    for (const OneBitStages::Table& table : stages.tables()) {
      onebit_lamb_moments_cuda(table.storage, table.units.pointer(), table.unit_places.pointer(),
                               static_cast<int64_t>(table.units.host().size()), work, dense, control, stream);
    }
    onebit_lamb_factors_cuda(tensors, work, control, stream);
    for (const OneBitStages::Table& table : stages.tables()) {
      onebit_lamb_update_cuda(table.storage, table.view(), work, dense, control, stream);
    }
    return;
  }
  const std::vector<Tile>& units = stages.units();
  for_each_tile(units, [&](int64_t u) { onebit_lamb_moments_cpu(work, units[static_cast<size_t>(u)], u); });
  for (int64_t tensor = 0; tensor < tensors; ++tensor) onebit_lamb_factor_cpu(work, tensor);
  for_each_tile(units, [&](int64_t u) { onebit_lamb_update_cpu(work, units[static_cast<size_t>(u)]); });
}

}  // namespace pacer::detail
