#include <pacer/schedulers/detail/layer_drop_hook.h>

#include <memory>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/files/number_text.h>
#include <pacer/hooks/detail/submodules.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/step_report.h>

namespace pacer {

std::shared_ptr<Hook> LayerDrop::hook() const { return std::make_shared<detail::LayerDropHook>(*this); }

namespace detail {

namespace {

class GateBlocks : public BlockWrapper {
 public:
  explicit GateBlocks(LayerDrop gates) : gates_(std::move(gates)) {}
  Tensors run(const BlockCall& call, const TensorFunction& rest, const Tensors& x) override {
    return gates_->gate_tensors(static_cast<int64_t>(call.index), call.results, x, rest);
  }

 private:
  LayerDrop gates_;
};

std::string depth_text(const LayerDropOptions& options) {
  if (options.last_layers()) return concatenate("last_layers ", *options.last_layers());
  if (options.shares()) {
    std::string text = "shares";
    for (const double share : *options.shares()) text += ' ' + exact_text(share);
    return text;
  }
  switch (options.depth().value_or(DropDepth::linear)) {
    case DropDepth::linear:
      return "depth linear";
    case DropDepth::from_zero:
      return "depth from_zero";
    case DropDepth::uniform:
      return "depth uniform";
    case DropDepth::exponential:
      return "depth exponential";
  }
  return {};  // not reached: LayerDrop refuses other values
}

}  // namespace

LayerDropHook::~LayerDropHook() {
  if (!parts_) return;
  gates_->in_use_ = false;
  if (gates_->blocks()) gates_->blocks().ptr()->unwrap(WrapperLevel::drop);
}

void LayerDropHook::attach(SessionParts& parts) {
  require(!gates_.is_empty(), "Session::use was given an empty LayerDrop");
  require(!gates_->is_in_use(), "this LayerDrop is in use by another Session; use one LayerDrop per model");
  require(gates_->layers() > 0,
          "this LayerDrop has no layers; call layer_drop->add(*block) for each block of the model");
  depth_share(gates_->options(), 0, gates_->layers());  // which refuses options for other layers
  const Blocks& blocks = gates_->blocks();
  if (blocks) {
    require_in_model(parts.model(), *blocks, "LayerDrop");
    require(gates_->layers() == static_cast<int64_t>(blocks->size()), "this LayerDrop was made for ",
            gates_->layers(), " blocks, but there are ", blocks->size(),
            " now; make it after the last push_back");
    blocks.ptr()->wrap(WrapperLevel::drop, std::make_shared<GateBlocks>(gates_));
  } else {
    require(
        is_in_model(parts.model(), *gates_),
        "this LayerDrop is no part of the model, so eval() would not reach it; in the model's constructor "
        "call register_module(\"layer_drop\", layer_drop)");
  }
  parts_ = &parts;
  gates_->in_use_ = true;
}

std::string LayerDropHook::agreement() const {
  const LayerDropOptions& options = gates_->options();
  const auto& schedule = options.schedule();
  const std::string text =
      concatenate(gates_->layers(), " layers, theta_bar ", exact_text(options.theta_bar()),
                  schedule ? ", schedule " + schedule->describe()
                           : ", gamma " + exact_text(options.gamma().value_or(1e-3)));
  return concatenate(text, ", ", depth_text(options), options.per_sample() ? ", by sample" : "", ", seed ",
                     options.seed());
}

bool LayerDropHook::settled(const Progress& progress) const {
  const auto& schedule = gates_->options().schedule();
  return !schedule || schedule->warmup_ended(progress);
}

void LayerDropHook::start(const Progress& /*progress*/) { gates_->set_rank(parts_->data_ranks().rank()); }

std::vector<at::Tensor> LayerDropHook::unused(const Progress& window) const {
  return gates_->is_active() ? gates_->dropped_parameters(window) : std::vector<at::Tensor>();
}

void LayerDropHook::gradients_ready(const Progress& window) {
  require(
      !gates_->is_active() || gates_->decisions_ > 0 || parts_->replicas,  // a stage may have no layer
      "no layer asked this LayerDrop whether it runs, so none would ever be dropped; in the model's forward "
      "write ",
      gates_->blocks() ? "x = blocks->run(i, &BlockImpl::forward, x)" : "x = layer_drop->gate(i, x, block)",
      " for each block");
  const bool active = gates_->is_active();
  kept_layers_ = active ? gates_->kept_layers(window) : static_cast<double>(gates_->layers());
  theta_ = active ? layer_drop_theta(gates_->options(), window) : 1;
}

void LayerDropHook::after_step(StepReport& report) {
  report.add("kept_layers", kept_layers_);
  report.add("theta", theta_);
}

}  // namespace detail
}  // namespace pacer
