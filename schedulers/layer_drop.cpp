#include <pacer/schedulers/layer_drop.h>

#include <unordered_set>

#include <ATen/ops/add.h>
#include <ATen/ops/sub.h>

#include <pacer/core/error.h>

namespace pacer {

int64_t LayerDropImpl::add(const torch::nn::Module& block) {
  parameters_of_.push_back(block.parameters());
  std::unordered_set<const void*> once;
  for (const at::Tensor& parameter : parameters_of_.back()) {
    if (once.insert(parameter.unsafeGetTensorImpl()).second) ++users_[parameter.unsafeGetTensorImpl()];
  }
  return layers() - 1;
}

int64_t LayerDropImpl::add() {
  parameters_of_.emplace_back();
  return layers() - 1;
}

LayerDropImpl::Decision LayerDropImpl::decide(int64_t i) const {
  require(i >= 0 && i < layers(), "LayerDrop has ", layers(), " layers and no layer ", i,
          "; call add() once for each block, and count from 0");
  if (!is_training()) return {true, 1};
  ++decisions_;
  const double probability = keep_probability(options_, i, layers(), progress_.step);
  return {keeps_layer(options_, i, layers(), progress_.step, progress_.micro_step), probability};
}

at::Tensor LayerDropImpl::mixed(const at::Tensor& x, const at::Tensor& y, double probability) {
  require(x.sizes() == y.sizes(), "a block behind LayerDrop::gate turned shape ", x.sizes(), " into ",
          y.sizes(), "; only blocks that keep the shape can be dropped");
  return probability == 1 ? y : at::add(x, at::sub(y, x), 1.0 / probability);
}

std::vector<at::Tensor> LayerDropImpl::dropped_parameters(const Progress& window) const {
  std::vector<at::Tensor> dropped;
  for (int64_t i = 0; i < layers(); ++i) {
    bool kept = false;
    for (int64_t m = window.micro_step; m < window.micro_steps && !kept; ++m) {
      kept = keeps_layer(options_, i, layers(), window.step, m);
    }
    if (kept) continue;
    for (const at::Tensor& parameter : parameters_of_[static_cast<size_t>(i)]) {
      if (users_.at(parameter.unsafeGetTensorImpl()) == 1) dropped.push_back(parameter);
    }
  }
  return dropped;
}

double LayerDropImpl::kept_layers(const Progress& window) const {
  int64_t kept = 0;
  for (int64_t i = 0; i < layers(); ++i) {
    for (int64_t m = 0; m < window.micro_steps; ++m) {
      kept += keeps_layer(options_, i, layers(), window.step, m);
    }
  }
  return static_cast<double>(kept) / static_cast<double>(window.micro_steps);
}

}  // namespace pacer
