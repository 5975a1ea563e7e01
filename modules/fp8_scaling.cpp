#include <pacer/modules/fp8_scaling.h>

#include <utility>
#include <vector>

#include <pacer/core/error.h>
#include <pacer/modules/detail/fp8_layer.h>
#include <pacer/modules/detail/model_modules.h>
#include <pacer/modules/linear.h>

namespace pacer {
namespace {

using detail::Fp8Layer;
using detail::Fp8Tensors;
using kernels::Fp8Format;

void require_within(const char* name, int64_t value, int64_t smallest, int64_t largest) {
  require(value >= smallest && value <= largest, "Fp8Options::", name, " must be from ", smallest, " to ",
          largest, ", not ", value);
}

void check(const Fp8Options& options) {
  require_within("amax_history", options.amax_history(), 1, 1024);
  require_within("margin", options.margin(), 0, 16);
  constexpr int64_t kMany = int64_t{1} << 32;
  require_within("keep_first", options.keep_first(), 0, kMany);
  require_within("keep_last", options.keep_last(), 0, kMany);
  require(options.gradients() == at::kFloat8_e5m2 || options.gradients() == at::kFloat8_e4m3fn,
          "Fp8Options::gradients must be Float8_e5m2 or Float8_e4m3fn, not ",
          c10::toString(options.gradients()));
}

struct NamedLinear {
  std::string name;
  const modules::LinearImpl* module;
};

// Each once, those that stay in 16 bits left out; so do weights in 4 bits, unless they are to take part.
std::vector<NamedLinear> linears(torch::nn::Module& model, const Fp8Options& options) {
  std::vector<NamedLinear> all;
  bool has_quantized = false;
  for (const auto& item : detail::named_modules_of(model)) {
    const auto* linear = item.value()->as<modules::LinearImpl>();
    if (linear == nullptr) continue;
    has_quantized = has_quantized || !linear->nf4().is_empty();
    if (linear->nf4().is_empty() || options.quantized_weights()) all.push_back({item.key(), linear});
  }
  require(
      !all.empty() || !has_quantized,
      "every pacer::modules::Linear of the model has its weight in 4 bits, and those compute in 8-bit floats "
      "only with Fp8Options::quantized_weights; set it, or use Precision::bf16");
  require(
      !all.empty(),
      "the model has no pacer::modules::Linear, and only those compute in 8-bit floats; build it of them, or "
      "use Precision::bf16");
  const auto kept = static_cast<size_t>(options.keep_first() + options.keep_last());
  require(kept < all.size(), "Fp8Options::keep_first and keep_last leave none of the ", all.size(),
          " pacer::modules::Linear of the model to compute in 8-bit floats");
  return {all.begin() + options.keep_first(), all.end() - options.keep_last()};
}

const at::Tensor& weight_of(const NamedLinear& linear) {
  const modules::Nf4Weight& nf4 = linear.module->nf4();
  return nf4.is_empty() ? linear.module->weight : nf4->codes;
}

// False for what lies on another rank.
bool has_values(const at::Tensor& tensor) {
  try {
    (void)tensor.const_data_ptr();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

at::Device device_of(const std::vector<NamedLinear>& all, std::optional<at::Device> wanted) {
  const at::Device device = wanted.value_or(weight_of(all.front()).device());
  for (const NamedLinear& linear : all) {
    const at::Tensor& weight = weight_of(linear);
    require(weight.device() == device || (wanted && !has_values(weight)), "the weight of ", linear.name,
            " is on ", weight.device(), " and not on ", device, ", where ",
            wanted ? "the model trains" : "that of " + all.front().name + " is",
            "; layers that compute in 8-bit floats must share a device");
  }
  require<Unavailable>(detail::multiplies_8_bits(device),
                       "the GPU of the model multiplies no 8-bit floats (that needs compute capability 8.9 "
                       "or later); use Precision::bf16");
  return device;
}

kernels::Fp8Rule rule_of(const Fp8Options& options) {
  kernels::Fp8Rule rule;
  rule.history = static_cast<uint32_t>(options.amax_history());
  rule.newest_only = options.newest_only();
  rule.margin = static_cast<int32_t>(options.margin());
  rule.power_of_two = options.power_of_two();
  return rule;
}

thread_local std::shared_ptr<Fp8Scaling> current_scaling;

}  // namespace

Fp8Scaling::Fp8Scaling(torch::nn::Module& model, const Fp8Options& options,
                       std::optional<at::Device> wanted_device)
    : options_(options) {
  check(options);
  const auto all = linears(model, options);
  const at::Device device = device_of(all, wanted_device);
  const bool is_delayed = options.recipe() == Fp8Recipe::delayed;
  const Fp8Format gradients = options.gradients() == at::kFloat8_e5m2 ? Fp8Format::e5m2 : Fp8Format::e4m3;
  std::vector<Fp8Tensors::Named> tensors;
  for (const NamedLinear& linear : all) {
    if (!is_delayed) break;
    const std::string prefix = linear.name.empty() ? "" : linear.name + ".";
    tensors.push_back({prefix + "input", Fp8Format::e4m3});
    tensors.push_back({prefix + "gradient", gradients});
  }
  tensors_ = std::make_shared<Fp8Tensors>(device, rule_of(options), std::move(tensors));
  for (size_t i = 0; i < all.size(); ++i) {
    std::optional<size_t> input, gradient;
    if (is_delayed) {
      input = 2 * i;
      gradient = 2 * i + 1;
    }
    layers_[all[i].module] = c10::make_intrusive<Fp8Layer>(tensors_, gradients, input, gradient);
  }
}

Fp8Scaling::~Fp8Scaling() = default;

int64_t Fp8Scaling::other_calls() const {
  int64_t calls = 0;
  for (const auto& [module, layer] : layers_) calls += layer->other_calls();
  return calls;
}

at::Tensor Fp8Scaling::amax() const { return tensors_->amax(); }
void Fp8Scaling::set_amax(const at::Tensor& amax) { tensors_->set_amax(amax); }

void Fp8Scaling::update(const kernels::GradientCheck* check) {
  tensors_->update(check);
  for (const auto& [module, layer] : layers_) layer->forget_weight();
}

void Fp8Scaling::forget() {
  tensors_->forget();
  for (const auto& [module, layer] : layers_) layer->forget_weight();
}

void Fp8Scaling::mark() { tensors_->mark(); }
void Fp8Scaling::forget_since_mark() { tensors_->forget_since_mark(); }
void Fp8Scaling::record(bool on) { tensors_->record(on); }

void Fp8Scaling::keep_weights(bool keep) {
  for (const auto& [module, layer] : layers_) layer->keep_weight(keep);
}

std::map<std::string, at::Tensor> Fp8Scaling::state() const { return tensors_->state(); }
void Fp8Scaling::set_state(const std::map<std::string, at::Tensor>& state) { tensors_->set_state(state); }

c10::intrusive_ptr<detail::Fp8Layer> Fp8Scaling::layer_of(const torch::nn::Module& module) const {
  const auto found = layers_.find(&module);
  return found == layers_.end() ? nullptr : found->second;
}

Fp8Scope::Fp8Scope(std::shared_ptr<Fp8Scaling> scaling)
    : before_(std::exchange(current_scaling, std::move(scaling))) {}
Fp8Scope::~Fp8Scope() { current_scaling = std::move(before_); }
const std::shared_ptr<Fp8Scaling>& Fp8Scope::current() { return current_scaling; }
void Fp8Scope::set_current(std::shared_ptr<Fp8Scaling> scaling) { current_scaling = std::move(scaling); }

}  // namespace pacer
