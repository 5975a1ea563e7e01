#include <pacer/modules/causal_lm.h>

#include <cmath>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>

#include <pacer/core/error.h>
#include <pacer/modules/deferred.h>
#include <pacer/modules/detail/head_sizes.h>
#include <pacer/modules/lora_adapter.h>

namespace pacer::modules {
namespace {

constexpr int64_t kFfnMultiple = 64;

int64_t default_ffn(int64_t hidden) {
  const int64_t wanted = (8 * hidden + 2) / 3;
  return (wanted + kFfnMultiple - 1) / kFfnMultiple * kFfnMultiple;
}

void check(const CausalLmOptions& options) {
  require(options.vocabulary() > 0 && options.layers() > 0,
          "CausalLmOptions::vocabulary and layers must be above 0, not ", options.vocabulary(), " and ",
          options.layers());
  require(options.hidden() > 0 && options.heads() > 0,
          "CausalLmOptions::hidden and heads must be above 0, not ", options.hidden(), " and ",
          options.heads());
  require(options.ffn() > 0, "CausalLmOptions::ffn must be above 0, not ", options.ffn());
  require(options.eps() > 0 && std::isfinite(options.eps()),
          "CausalLmOptions::eps must be a number above 0, not ", options.eps());
  require(options.init_std() >= 0 && std::isfinite(options.init_std()),
          "CausalLmOptions::init_std must be a number from 0 on, not ", options.init_std());
}

Rotary rotary_of(const CausalLmOptions& options) {
  return options.scaling() ? Rotary(options.theta(), *options.scaling()) : Rotary(options.theta());
}

void check_ids(const char* what, const at::Tensor& ids) {
  require(ids.dim() == 2 && ids.scalar_type() == at::kLong, "CausalLm takes ", what,
          " [batch, sequence] in Long, not ", ids.scalar_type(), " of shape ", ids.sizes());
}

}  // namespace

CausalLmOptions::CausalLmOptions(int64_t vocabulary, int64_t hidden, int64_t layers, int64_t heads)
    : layer_(hidden, heads), vocabulary_(vocabulary), layers_(layers) {
  layer_.ffn(default_ffn(hidden)).activation(Activation::swiglu).normalization(Normalization::rms);
  layer_.causal(true).bias(false);
}

CausalLmImpl::CausalLmImpl(const CausalLmOptions& model_options)
    : options(model_options), rotary(rotary_of(model_options)) {
  check(options);
  CausalLmImpl::reset();
}

// Modules are registered in the order of their use, which is the order in which Shards expects them.
void CausalLmImpl::reset() {
  layers = Blocks();
  head = nullptr;
  const TransformerLayerOptions layer = TransformerLayerOptions(options.layer()).rotary(rotary);
  embedding = register_module("embedding", torch::nn::Embedding(options.vocabulary(), options.hidden()));
  register_module("layers", layers);
  for (int64_t i = 0; i < options.layers(); ++i) {
    layers->push_back(TransformerLayer(layer));
    if (options.deferred()) defer_initialization(*layers->ptr(static_cast<size_t>(i)));
  }
  norm = register_module("norm", RmsNorm(RmsNormOptions(options.hidden()).eps(options.eps())));
  if (!options.tied()) {
    head = register_module(
        "head",
        torch::nn::Linear(torch::nn::LinearOptions(options.hidden(), options.vocabulary()).bias(false)));
  }
  reset_parameters();
}

void CausalLmImpl::reset_parameters() { reset_parameters(*this); }

void CausalLmImpl::reset_parameters(torch::nn::Module& part) const {
  const at::NoGradGuard no_grad;
  for (const auto& module : part.modules(/*include_self=*/false)) {
    if (module->as<LoraAdapterImpl>() != nullptr) continue;
    for (const auto& parameter : module->named_parameters(/*recurse=*/false)) {
      at::Tensor value = parameter.value();
      if (is_deferred(value)) continue;
      if (value.dim() == 2) {
        value.normal_(0, options.init_std());
      } else {
        value.fill_(parameter.key() == "bias" ? 0 : 1);
      }
    }
  }
}

at::Tensor CausalLmImpl::embed(const at::Tensor& ids) {
  check_ids("ids", ids);
  return embedding(ids);
}

at::Tensor CausalLmImpl::run_layer(size_t i, const at::Tensor& x) {
  return layers->run(i, &TransformerLayerImpl::forward, x, at::Tensor());
}

at::Tensor CausalLmImpl::hidden_states(const at::Tensor& ids) {
  at::Tensor x = embed(ids);
  for (size_t i = 0; i < layers->size(); ++i) x = run_layer(i, x);
  return norm(x);
}

at::Tensor CausalLmImpl::forward(const at::Tensor& ids) {
  return at::linear(hidden_states(ids), head_weight());
}

at::Tensor CausalLmImpl::loss_behind_layers(const at::Tensor& x, const at::Tensor& targets,
                                            const LinearCrossEntropyOptions& loss_options) {
  return head_loss(norm(x), targets, loss_options);
}

at::Tensor CausalLmImpl::loss(const at::Tensor& ids, const at::Tensor& targets,
                              const LinearCrossEntropyOptions& loss_options) {
  return head_loss(hidden_states(ids), targets, loss_options);
}

double CausalLmImpl::operations_per_token(int64_t sequence) const {
  require(sequence > 0, "CausalLm::operations_per_token needs a sequence above 0, not ", sequence);
  const int64_t head_dim = detail::head_dim_of(options);
  const int64_t of_queries = options.heads() * head_dim, of_keys = detail::kv_heads_of(options) * head_dim;
  const int64_t of_layer = options.hidden() * (2 * of_queries + 2 * of_keys + 3 * options.ffn());
  const int64_t matrices = options.layers() * of_layer + options.vocabulary() * options.hidden();
  return 6.0 * static_cast<double>(matrices) +
         12.0 * static_cast<double>(options.layers() * of_queries) * static_cast<double>(sequence);
}

}  // namespace pacer::modules
