#include <pacer/schedulers/detail/layer_drop_hook.h>

#include <algorithm>

#include <pacer/core/error.h>
#include <pacer/schedulers/detail/number_text.h>
#include <pacer/schedulers/session_parts.h>
#include <pacer/schedulers/step_report.h>

namespace pacer::detail {

LayerDropHook::~LayerDropHook() {
  if (model_) gates_->set_in_use(false);
}

void LayerDropHook::attach(SessionParts& parts) {
  require(!gates_.is_empty(), "Session::use was given an empty LayerDrop");
  require(!gates_->is_in_use(), "this LayerDrop is in use by another Session; use one LayerDrop per model");
  const auto modules = parts.model().modules(/*include_self=*/false);
  const bool is_registered =
      std::any_of(modules.begin(), modules.end(), [&](const auto& m) { return m.get() == gates_.get(); });
  require(
      is_registered,
      "this LayerDrop is no part of the model, so eval() would not reach it; in the model's constructor call "
      "register_module(\"layer_drop\", layer_drop)");
  require(gates_->layers() > 0,
          "this LayerDrop has no layers; call layer_drop->add(*block) for each block of the model");
  model_ = &parts.model();
  gates_->set_in_use(true);
}

std::string LayerDropHook::agreement() const {
  const LayerDropOptions& options = gates_->options();
  return concatenate(gates_->layers(), " layers, theta_bar ", exact_text(options.theta_bar()), ", gamma ",
                     exact_text(options.gamma()), ", seed ", options.seed());
}

std::vector<at::Tensor> LayerDropHook::unused(const Progress& window) const {
  return gates_->is_training() ? gates_->dropped_parameters(window) : std::vector<at::Tensor>();
}

void LayerDropHook::gradients_ready(const Progress& window) {
  require(
      !gates_->is_training() || gates_->decisions() > 0,
      "no layer asked this LayerDrop whether it runs, so none would ever be dropped; in the model's forward "
      "write x = layer_drop->gate(i, x, block) for each block");
  kept_layers_ = gates_->is_training() ? gates_->kept_layers(window) : static_cast<double>(gates_->layers());
}

void LayerDropHook::after_step(StepReport& report) { report.add("kept_layers", kept_layers_); }

}  // namespace pacer::detail
