#include <pacer/hooks/gradient_release.h>

#include <atomic>
#include <exception>
#include <utility>
#include <vector>

#include <ATen/ops/zeros_like.h>
#include <torch/nn/modules/embedding.h>

#include <pacer/collectives/detail/gradient_hook.h>
#include <pacer/core/error.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/modules/detail/model_modules.h>
#include <pacer/modules/embedding.h>

namespace pacer {
namespace {

bool has_sparse_gradients(const torch::nn::Module& module) {
  const auto is_sparse = [](const auto* embedding) {
    return embedding != nullptr && embedding->options.sparse() && embedding->weight.requires_grad();
  };
  return is_sparse(module.as<torch::nn::EmbeddingImpl>()) || is_sparse(module.as<modules::EmbeddingImpl>()) ||
         is_sparse(module.as<torch::nn::EmbeddingBagImpl>());
}

void check_layers(const torch::nn::Module& model) {
  const auto check = [](const torch::nn::Module& module, const std::string& name) {
    require(!has_sparse_gradients(module), "GradientRelease does not go with the sparse gradients of ",
            name.empty() ? "the model" : name, "; make the layer with sparse(false)");
  };
  check(model, "");
  for (const auto& item : detail::named_modules_of(model)) check(*item.value(), item.key());
}

}  // namespace

// What gradients meet that come in backward, on autograd's threads.
struct GradientRelease::Step {
  void arrive(const at::Tensor& parameter) {
    if (is_under_way) parts->session_optimizer()->release(parameter, parts->released);
  }
  void end(bool has_failed) {
    if (is_under_way.exchange(false)) parts->session_optimizer()->end_release(has_failed, parts->released);
  }

  SessionParts* parts = nullptr;
  std::atomic<bool> is_under_way{false};
};

GradientRelease::GradientRelease() : step_(std::make_shared<Step>()) {}

GradientRelease::~GradientRelease() {
  for (const auto& item : parameters_) detail::remove_gradient_hook(item.second, step_.get());
}

void GradientRelease::attach(SessionParts& parts) {
  const SessionOptimizer* own = parts.session_optimizer();
  require(own != nullptr,
          "GradientRelease updates parameters one by one, which only optimizers of pacer do; use FusedAdamW, "
          "FusedAdam, FusedSgd or FusedRmsprop, or leave the hook out");
  const std::string reason = own->unreleased_reason();
  require(reason.empty(), "GradientRelease does not go with this optimizer, because ", reason);
  require(parts.world().world_size() == 1,
          "GradientRelease updates a parameter with the gradient of one rank, but ",
          parts.world().world_size(), " ranks train together; use Shards, which also keeps few gradients");
  parts.releases_gradients = true;
  parts_ = &parts;
  step_->parts = &parts;
}

void GradientRelease::arrange() {
  require(!parts_->accumulates_gradients && parts_->micro_steps == 1 && !parts_->micro_steps_at,
          "GradientRelease has used each gradient up when a backward ends, so none is there for others to be "
          "added to; leave out GradientAccumulation, or GradientRelease");
  require(
      !parts_->has_guard(),
      "GradientRelease updates parameters before all gradients of the step are there, but GradientClipping "
      "and Precision in fp16 or fp8 look at all of them first, by_previous_norm as well; leave those out, "
      "or GradientRelease");
  require(
      parts_->replicas == nullptr && !parts_->gradients_are_shared_out,
      "GradientRelease does not go with Pipeline and Shards, which have gradients elsewhere when they are "
      "whole; leave one of the two out");
  check_layers(parts_->model());
}

// Parameters come and go between steps.
void GradientRelease::follow_parameters() {
  std::unordered_map<const void*, at::Tensor> now;
  for (const at::Tensor& parameter : detail::all_optimizer_parameters(*parts_)) {
    if (!now.emplace(parameter.unsafeGetTensorImpl(), parameter).second) continue;
    if (parameters_.count(parameter.unsafeGetTensorImpl()) != 0) continue;
    detail::add_gradient_hook(parameter, step_,
                              [step = step_.get()](const at::Tensor& reached) { step->arrive(reached); });
  }
  for (const auto& [key, parameter] : parameters_) {
    if (now.count(key) == 0) detail::remove_gradient_hook(parameter, step_.get());
  }
  parameters_ = std::move(now);
}

void GradientRelease::backward_begin(const Progress& /*progress*/) {
  parts_->released.clear();
  const std::optional<StepInputs> inputs = parts_->step_inputs();
  if (!inputs) return;  // the window trains on nothing
  follow_parameters();
  parts_->session_optimizer()->begin_release(*inputs);
  step_->is_under_way = true;
}

// Parameters of layers that were dropped have zero gradients, one after the other.
void GradientRelease::backward_end(const Progress& progress) {
  for (const at::Tensor& parameter : parts_->unused(progress)) {
    const bool has_come = parts_->released.count(parameter.unsafeGetTensorImpl()) != 0;
    if (has_come || !step_->is_under_way || !parameter.requires_grad() || parameter.grad().defined())
      continue;
    if (parameters_.count(parameter.unsafeGetTensorImpl()) == 0) continue;
    parameter.mutable_grad() = at::zeros_like(parameter).detach();
    step_->arrive(parameter);
  }
  step_->end(/*has_failed=*/false);
}

// Called where the exception is handled.
void GradientRelease::backward_failed() {
  std::string what = "an unknown error";
  try {
    throw;
  } catch (const std::exception& error) {
    what = error.what();
  } catch (...) {
  }
  step_->end(/*has_failed=*/true);
  if (parts_->released.empty()) return;
  throw Error(detail::concatenate(
      "backward failed when GradientRelease had updated ", parts_->released.size(), " of ",
      parameters_.size(), " parameters, which have taken step ", parts_->progress.step + 1,
      " while the others have not; resume from a checkpoint, or go on if that does no harm: ", what));
}

}  // namespace pacer
