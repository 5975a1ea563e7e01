#include <pacer/modules/detail/fp8_tensors.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>
#include <pacer/kernels/stream.h>
#include <pacer/modules/detail/column_sums.h>

namespace pacer::detail {
namespace {

using kernels::Fp8Scale;

constexpr int64_t kScaleWords = sizeof(Fp8Scale) / sizeof(int32_t);
constexpr int64_t kAmaxWord = offsetof(Fp8Scale, amax) / sizeof(int32_t);
constexpr int64_t kCountWord = offsetof(Fp8Scale, count) / sizeof(int32_t);
constexpr int64_t kMeasurements = 512;
// Matrix libraries want scales at multiples of 16 bytes.
constexpr int64_t kMeasurementWords = 8, kInverseWord = 4;

// On the CPU: row i of scales and of histories.
Fp8Scale* scale_in(const at::Tensor& scales, size_t i) {
  return static_cast<Fp8Scale*>(scales.mutable_data_ptr()) + i;
}
uint32_t* history_in(const at::Tensor& histories, size_t i) {
  return static_cast<uint32_t*>(histories.mutable_data_ptr()) + static_cast<int64_t>(i) * histories.size(1);
}

const at::Tensor& named(const std::map<std::string, at::Tensor>& state, const std::string& name) {
  const auto found = state.find(name);
  require(found != state.end(), "the state of 8-bit scales to load has no \"", name, "\"");
  return found->second;
}

// A scale and what led to it, as a state holds them.
struct Loaded {
  Fp8Scale scale;
  std::vector<uint32_t> history;
};

Loaded loaded(const std::map<std::string, at::Tensor>& state, const std::string& name,
              kernels::Fp8Format format, const kernels::Fp8Rule& rule) {
  const at::Tensor scale = named(state, name + ".scale");
  const at::Tensor history = named(state, name + ".history");
  require(scale.scalar_type() == at::kFloat && scale.dim() == 0 && history.scalar_type() == at::kFloat &&
              history.dim() == 1,
          "the state of 8-bit scales to load has another form for \"", name, "\"");
  const at::Tensor amaxes = history.cpu().contiguous();
  std::vector<float> recorded;
  for (int64_t i = 0; i < amaxes.numel(); ++i) {
    const float amax = amaxes.const_data_ptr<float>()[i];
    require(amax >= 0 && kernels::is_finite_amax(kernels::bits_of(amax)), "the history of \"", name,
            "\" to load has ", amax, ", which no magnitude can be");
    if (amax > 0) recorded.push_back(amax);
  }
  const size_t kept = std::min<size_t>(recorded.size(), rule.history);
  Loaded result;
  result.history.resize(rule.history);
  for (size_t i = 0; i < kept; ++i) {
    result.history[i] = kernels::bits_of(recorded[recorded.size() - kept + i]);
  }
  result.scale.format = format;
  result.scale.count = static_cast<uint32_t>(kept);
  result.scale.scale = scale.item<float>();
  require(result.scale.scale > 0 && result.scale.scale <= 0x1p120f, "the scale of \"", name, "\" to load is ",
          result.scale.scale, ", which no scale can be");
  result.scale.inverse = 1 / result.scale.scale;
  return result;
}

}  // namespace

bool multiplies_8_bits(at::Device device) {
  constexpr int kLeast = 89;
  return !device.is_cuda() || kernels::compute_capability(device.index()) >= kLeast;
}

Fp8Tensors::Fp8Tensors(at::Device device, const kernels::Fp8Rule& rule, std::vector<Named> tensors)
    : device_(device), rule_(rule), tensors_(std::move(tensors)), has_history_(tensors_.size(), false) {
  const auto count = static_cast<int64_t>(tensors_.size());
  const at::Tensor scales = at::zeros({count, kScaleWords}, at::kInt);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    Fp8Scale fresh;
    fresh.format = tensors_[i].format;
    std::memcpy(scale_in(scales, i), &fresh, sizeof fresh);
  }
  scales_ = scales.to(device_);
  histories_ = at::zeros({count, static_cast<int64_t>(rule_.history)}, scales_.options());
}

Fp8Tensors::Measurement Fp8Tensors::new_measurement() {
  if (!measurements_.defined() || used_measurements_ == kMeasurements) {
    measurements_ =
        at::zeros({kMeasurements, kMeasurementWords}, at::TensorOptions().dtype(at::kFloat).device(device_));
    used_measurements_ = 0;
  }
  const at::Tensor measurement = measurements_.select(0, used_measurements_++);
  return {static_cast<uint32_t*>(measurement.mutable_data_ptr()), measurement.narrow(0, kInverseWord, 1)};
}

void Fp8Tensors::run(const kernels::Fp8Cast& cast) const {
  if (device_.is_cuda()) {
    kernels::fp8_cast_cuda(cast, current_stream(device_));
  } else {
    kernels::fp8_cast_cpu(cast, 0, cast.rows);
  }
}

Fp8Matrix Fp8Tensors::encode(int64_t rows, int64_t columns, const Role& role, bool transposed,
                             const Make& make) {
  require<Error>(
      device_.is_cpu() || !is_capturing(device_),
      "a pass in 8-bit floats cannot be captured into a CUDA graph, because its scales and weights "
      "are made anew from step to step; leave forward and backward outside of the capture");
  const c10::DeviceGuard guard(device_);
  const c10::InferenceMode no_inference(false);  // what an evaluation makes serves training, too
  const Measurement measurement = new_measurement();
  kernels::Fp8Target to;
  to.format = role.format;
  to.rule = rule_;
  to.state = role.tensor ? scales() + *role.tensor : nullptr;
  to.records = role.records && records_;
  to.measured =
      role.amax.defined() ? static_cast<uint32_t*>(role.amax.mutable_data_ptr()) : measurement.measured;
  to.inverse = measurement.inverse.mutable_data_ptr<float>();
  const bool has_history = role.tensor && has_history_[*role.tensor];
  if (!has_history && !role.amax.defined()) make(to);
  const auto bytes = at::TensorOptions().dtype(at::kByte).device(device_);
  Fp8Matrix matrix;
  matrix.inverse = measurement.inverse;
  matrix.codes = at::empty({rows, columns}, bytes);
  to.codes = matrix.codes.mutable_data_ptr<uint8_t>();
  if (transposed) {
    matrix.transposed = at::empty({columns, rows}, bytes);
    to.transposed = matrix.transposed.mutable_data_ptr<uint8_t>();
  }
  make(to);
  return matrix;
}

Fp8Matrix Fp8Tensors::cast(at::TensorList x, const Role& role, const Fp8Extras& extras,
                           const kernels::Dropout& dropout) {
  std::vector<at::Tensor> dense;
  for (const at::Tensor& matrix : x) dense.push_back(readable(matrix));
  const int64_t rows = dense[0].size(0), columns = dense[0].size(1) * static_cast<int64_t>(dense.size());
  const ColumnSums sums(extras.sums, rows, columns, device_);
  Fp8Matrix matrix = encode(rows, columns, role, extras.transposed, [&](const kernels::Fp8Target& to) {
    kernels::Fp8Cast cast;
    cast.type = element_type(dense[0].scalar_type());
    cast.x = dense[0].const_data_ptr();
    for (size_t i = 1; i < dense.size(); ++i) cast.beside[i - 1] = dense[i].const_data_ptr();
    cast.rows = rows;
    cast.columns = columns;
    cast.to = to;
    cast.dropout = dropout;
    if (to.codes != nullptr) {
      cast.partials = sums.partials_memory();
      cast.column_sums = sums.sums_memory();
    }
    run(cast);
  });
  matrix.sums = sums.sums;
  return matrix;
}

at::Tensor Fp8Tensors::transposed(const at::Tensor& codes) const {
  const c10::DeviceGuard guard(device_);
  const int64_t rows = codes.size(0), columns = codes.size(1);
  const at::Tensor result = at::empty({columns, rows}, codes.options());
  if (device_.is_cuda()) {
    kernels::fp8_transpose_cuda(codes.const_data_ptr<uint8_t>(), rows, columns,
                                result.mutable_data_ptr<uint8_t>(), current_stream(device_));
  } else {
    kernels::fp8_transpose_cpu(codes.const_data_ptr<uint8_t>(), rows, columns,
                               result.mutable_data_ptr<uint8_t>(), 0, rows);
  }
  return result;
}

at::Tensor Fp8Tensors::amax() const { return scales_.select(1, kAmaxWord).contiguous(); }
void Fp8Tensors::set_amax(const at::Tensor& amax) { scales_.select(1, kAmaxWord).copy_(amax); }
void Fp8Tensors::mark() { marked_ = scales_.select(1, kAmaxWord).clone(); }

void Fp8Tensors::forget() {
  scales_.select(1, kAmaxWord).zero_();
  marked_.reset();
}

void Fp8Tensors::forget_since_mark() { marked_.defined() ? set_amax(marked_) : forget(); }

void Fp8Tensors::update(const kernels::GradientCheck* check) {
  marked_.reset();
  if (tensors_.empty()) return;
  const c10::DeviceGuard guard(device_);
  if (device_.is_cuda()) {
    kernels::fp8_update_cuda(scales(), histories(), static_cast<int64_t>(tensors_.size()), rule_, check,
                             current_stream(device_));
  } else {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (check != nullptr && check->non_finite != 0) scales()[i].amax = 0;
      kernels::fp8_update(scales()[i], history_in(histories_, i), rule_);
    }
  }
  learn_of_histories();
}

void Fp8Tensors::learn_of_histories() {
  if (std::find(has_history_.begin(), has_history_.end(), false) == has_history_.end()) return;
  if (counts_ && counts_->arrived()) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      has_history_[i] = counts_->value().const_data_ptr<int32_t>()[i] > 0;
    }
    counts_.reset();
  }
  if (!counts_) counts_ = start_host_copy(scales_.select(1, kCountWord).contiguous());
}

std::map<std::string, at::Tensor> Fp8Tensors::state() const {
  std::map<std::string, at::Tensor> state;
  const at::Tensor scales = scales_.cpu(), histories = histories_.cpu();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Fp8Scale& scale = *scale_in(scales, i);
    const uint32_t* ring = history_in(histories, i);
    const at::Tensor amaxes = at::zeros({histories.size(1)}, at::kFloat);
    const uint32_t recorded = std::min(scale.count, rule_.history);
    for (uint32_t k = 0; k < recorded; ++k) {  // the oldest first
      amaxes.mutable_data_ptr<float>()[k] =
          kernels::float_of(ring[(scale.count - recorded + k) % rule_.history]);
    }
    state[tensors_[i].name + ".scale"] = at::full({}, scale.scale, at::kFloat);
    state[tensors_[i].name + ".history"] = amaxes;
  }
  return state;
}

void Fp8Tensors::set_state(const std::map<std::string, at::Tensor>& state) {
  std::vector<Loaded> all;
  for (const Named& tensor : tensors_) all.push_back(loaded(state, tensor.name, tensor.format, rule_));
  const at::Tensor scales = scales_.cpu().clone(), histories = at::zeros(histories_.sizes(), at::kInt);
  for (size_t i = 0; i < all.size(); ++i) {
    std::memcpy(scale_in(scales, i), &all[i].scale, sizeof(Fp8Scale));
    std::copy(all[i].history.begin(), all[i].history.end(), history_in(histories, i));
    has_history_[i] = all[i].scale.count > 0;
  }
  counts_.reset();
  scales_.copy_(scales);
  histories_.copy_(histories);
}

}  // namespace pacer::detail
