#include <pacer/modules/sync_batch_norm.h>

#include <exception>
#include <ostream>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/batch_statistics.h>
#include <pacer/modules/tensor_call.h>

namespace pacer::modules {
namespace {

using torch::autograd::AutogradContext;

// What backward needs beside x and the weight.
struct Call : torch::CustomClassHolder {
  std::shared_ptr<StatisticsExchange> exchange;
  detail::BatchMoments moments;
  double eps = 0;
};
using CallPtr = c10::intrusive_ptr<Call>;

std::string name_of(int64_t channels) {
  return detail::concatenate("a SyncBatchNorm of ", channels, " channels");
}

// Does f, which the other ranks do, too. Where it throws here, they hear why.
template <class F>
auto with_others(StatisticsExchange& exchange, int64_t channels, const char* pass, const F& f) {
  try {
    return f();
  } catch (const std::exception& error) {
    exchange.leave(detail::concatenate("the ", pass, " of ", name_of(channels), " failed: ", error.what()));
    throw;
  }
}

// Inputs: the call, then x, and weight and bias where there are any.
struct SyncBatchNormNode : torch::autograd::Function<SyncBatchNormNode> {
  static constexpr const char* kCall = "call";

  static at::Tensor forward(AutogradContext* context, CallPtr call, at::TensorList inputs) {
    const bool is_affine = inputs.size() > 1;
    const at::Tensor x = inputs[0];
    const at::Tensor weight = is_affine ? inputs[1] : at::Tensor(),
                     bias = is_affine ? inputs[2] : at::Tensor();
    at::Tensor y = detail::normalize_part(x, weight, bias, call->moments, call->eps);
    context->save_for_backward({x, weight});
    context->saved_data[kCall] = c10::IValue::make_capsule(std::move(call));
    return y;
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const auto call = c10::static_intrusive_pointer_cast<Call>(context->saved_data[kCall].toCapsule());
    const int64_t channels = call->moments.mean.numel();
    return with_others(*call->exchange, channels, "backward pass", [&] {
      require(!at::GradMode::is_enabled(), name_of(channels),
              " over several ranks has no second derivative (create_graph); put a torch::nn::BatchNorm in "
              "its place");
      const Tensors saved = context->get_saved_variables();
      const at::Tensor &dy = gradients[0], &x = saved[0], &weight = saved[1];
      const detail::PartSums part = detail::part_sums(dy, x, weight, call->moments, call->eps);
      Tensors result(weight.defined() ? 4 : 2);
      if (context->needs_input_grad(0)) {
        call->exchange->all_reduce(part.sums);
        result[1] = detail::input_gradient(dy, x, weight, call->moments, part.sums);
      }
      if (weight.defined() && context->needs_input_grad(1)) result[2] = part.weight;
      if (weight.defined() && context->needs_input_grad(2)) result[3] = part.bias;
      return result;
    });
  }
};

void check_options(const torch::nn::BatchNormOptions& options) {
  require(options.num_features() > 0,
          "pacer::modules::SyncBatchNorm needs a number of channels above 0, not ", options.num_features());
}

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& batch_norm_options)
    : options(batch_norm_options) {
  check_options(options);
  SyncBatchNormImpl::reset();
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& batch_norm_options,
                                     const BatchNormTensors& tensors)
    : options(batch_norm_options) {
  check_options(options);
  take(tensors, tensors.weight.defined() && !tensors.weight.requires_grad(),
       tensors.bias.defined() && !tensors.bias.requires_grad());
}

void SyncBatchNormImpl::take(const BatchNormTensors& tensors, bool weight_is_frozen, bool bias_is_frozen) {
  weight = register_parameter("weight", tensors.weight, tensors.weight.defined() && !weight_is_frozen);
  bias = register_parameter("bias", tensors.bias, tensors.bias.defined() && !bias_is_frozen);
  running_mean = register_buffer("running_mean", tensors.running_mean);
  running_var = register_buffer("running_var", tensors.running_var);
  num_batches_tracked = register_buffer("num_batches_tracked", tensors.num_batches_tracked);
}

// Also what a clone is filled after, so what was frozen stays so.
void SyncBatchNormImpl::reset() {
  const int64_t channels = options.num_features();
  BatchNormTensors tensors;
  if (options.affine()) {
    tensors.weight = at::empty({channels});
    tensors.bias = at::empty({channels});
  }
  if (options.track_running_stats()) {
    tensors.running_mean = at::empty({channels});
    tensors.running_var = at::empty({channels});
    tensors.num_batches_tracked = at::zeros({}, at::kLong);
  }
  take(tensors, weight.defined() && !weight.requires_grad(), bias.defined() && !bias.requires_grad());
  reset_parameters();
}

void SyncBatchNormImpl::reset_running_stats() {
  if (!running_mean.defined()) return;
  running_mean.zero_();
  running_var.fill_(1);
  num_batches_tracked.zero_();
}

void SyncBatchNormImpl::reset_parameters() {
  reset_running_stats();
  if (!weight.defined()) return;
  const at::NoGradGuard no_grad;
  weight.fill_(1);
  bias.zero_();
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "pacer::modules::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps()
         << ", momentum=";
  if (options.momentum()) {
    stream << *options.momentum();
  } else {
    stream << "None";
  }
  stream << ", affine=" << std::boolalpha << options.affine()
         << ", track_running_stats=" << options.track_running_stats() << ")";
}

void SyncBatchNormImpl::check(const at::Tensor& x) const {
  const std::string name = name_of(options.num_features());
  require(x.defined(), name, " was given an undefined tensor");
  require(x.dim() >= 2, name, " takes tensors [N, C] or [N, C, ...], not one of ", x.dim(), " dimensions");
  require(x.size(1) == options.num_features(), name, " was given a tensor ", x.sizes(), " of ", x.size(1),
          " channels; the channels are dimension 1");
}

// What plain batch norm leaves to LibTorch.
void SyncBatchNormImpl::check_parts(const at::Tensor& x) const {
  const std::string name = name_of(options.num_features());
  const at::ScalarType type = x.scalar_type(), statistics = detail::statistics_type(x);
  require(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble, name,
          " takes Float, BFloat16, Half or Double, not ", type);
  require(x.device() == exchange_->device(), name, " was given a tensor on ", x.device().str(),
          ", but its ranks are joined on ", exchange_->device().str(),
          "; move model and input to world->device()");
  for (const at::Tensor& tensor : {weight, bias, running_mean, running_var}) {
    if (!tensor.defined()) continue;
    require(tensor.scalar_type() == statistics, name, " has parameters or statistics in ",
            tensor.scalar_type(), ", but over several ranks they must be ", statistics, " for an input of ",
            type, "; call layer->to(torch::k", statistics, ")");
    require(tensor.device() == x.device(), name, " is on ", tensor.device().str(), ", but its input on ",
            x.device().str());
  }
}

// How far running statistics move towards those of the batch.
double SyncBatchNormImpl::count_batch() {
  if (!is_training() || !running_mean.defined()) return 0;
  num_batches_tracked.add_(1);
  return options.momentum() ? *options.momentum() : 1 / num_batches_tracked.item<double>();
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& x) {
  const bool is_shared = is_training() && exchange_ != nullptr && exchange_->ranks() > 1;
  if (is_shared) return forward_together(x);
  return forward_alone(x, /*uses_batch=*/is_training() || !running_mean.defined());
}

at::Tensor SyncBatchNormImpl::forward_alone(const at::Tensor& x, bool uses_batch) {
  check(x);
  require(!uses_batch || detail::values_per_channel(x) > 1, name_of(options.num_features()),
          " needs at least two values per channel in train(), but was given a tensor ", x.sizes());
  const double momentum = count_batch();
  return at::batch_norm(x, weight, bias, running_mean, running_var, uses_batch, momentum, options.eps(),
                        at::globalContext().userEnabledCuDNN());
}

at::Tensor SyncBatchNormImpl::forward_together(const at::Tensor& any) {
  const int64_t channels = options.num_features();
  const char* const pass = "forward pass";
  at::Tensor x;
  const at::Tensor moments = with_others(*exchange_, channels, pass, [&] {
    check(any);
    check_parts(any);
    x = any.contiguous(any.suggest_memory_format());
    const at::NoGradGuard no_grad;
    return exchange_->all_gather(detail::part_moments(x, options.eps()));
  });
  // Where all have fewer than two, all look, and throw alike; who has more knows without waiting for a GPU.
  require(detail::values_per_channel(x) > 1 || detail::values_of_all(moments) > 1.5, name_of(channels),
          " needs at least two values per channel over all ranks in train(); here it was given a tensor ",
          x.sizes());
  return with_others(*exchange_, channels, pass, [&] {
    const auto call = c10::make_intrusive<Call>();
    call->exchange = exchange_;
    call->eps = options.eps();
    {
      const at::NoGradGuard no_grad;
      call->moments =
          detail::join_moments(moments, x, {running_mean, running_var, count_batch()}, options.eps());
    }
    Tensors inputs = {x};
    if (weight.defined()) inputs.insert(inputs.end(), {weight, bias});
    return SyncBatchNormNode::apply(call, at::TensorList(inputs));
  });
}

}  // namespace pacer::modules
