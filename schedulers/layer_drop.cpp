#include <pacer/schedulers/layer_drop.h>

#include <unordered_map>

#include <ATen/ops/add.h>
#include <ATen/ops/sub.h>

#include <pacer/core/error.h>

namespace pacer {

LayerDropImpl::LayerDropImpl(LayerDropOptions options) : options_(options) {
  layer_drop_theta(options_, 0);  // which refuses what is out of range
}

LayerDropImpl::LayerDropImpl(Blocks blocks, LayerDropOptions options) : LayerDropImpl(options) {
  blocks_ = std::move(blocks);
  require(!blocks_.is_empty() && blocks_->size() > 0,
          "LayerDrop was given Blocks without a block; add the blocks before it is made");
  for (const auto& block : *blocks_) add(*block);
}

int64_t LayerDropImpl::add(const torch::nn::Module& block) {
  layers_.push_back(block.weak_from_this());
  parameters_of_.push_back(block.parameters());
  count_users();
  return layers() - 1;
}

int64_t LayerDropImpl::add() {
  layers_.emplace_back();
  parameters_of_.emplace_back();
  return layers() - 1;
}

void LayerDropImpl::refresh_parameters() {
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (const auto layer = layers_[i].lock()) parameters_of_[i] = layer->parameters();
  }
  count_users();
}

// A layer may have a parameter twice; then it counts twice here and where it is dropped.
void LayerDropImpl::count_users() {
  users_.clear();
  for (const auto& of_layer : parameters_of_) {
    for (const at::Tensor& parameter : of_layer) ++users_[parameter.unsafeGetTensorImpl()];
  }
}

LayerDropImpl::Decision LayerDropImpl::decide(int64_t i) const {
  require(i >= 0 && i < layers(), "LayerDrop has ", layers(), " layers and no layer ", i,
          "; call add() once for each block, and count from 0");
  if (!is_active()) return {true, 1};
  ++decisions_;
  const Progress progress = replayed(this, progress_);
  const double probability = keep_probability(options_, i, layers(), progress.step);
  return {keeps_layer(options_, i, layers(), progress.step, progress.micro_step), probability};
}

Tensors LayerDropImpl::gate_tensors(int64_t i, size_t results, const Tensors& x,
                                    const TensorFunction& block) const {
  const size_t count = results == 0 ? x.size() : results;
  require(count <= x.size(), "layer ", i, " returns ", count, " tensors and takes ", x.size(),
          "; a layer that can be dropped returns its first arguments, changed");
  const Decision decision = decide(i);
  Tensors y = decision.keep ? block(x) : x;
  if (!decision.keep) y.resize(count);
  require(y.size() == count, "layer ", i, " takes ", count, " tensors and returns ", y.size(),
          "; a layer that can be dropped returns its arguments, changed");
  if (!decision.keep) return y;
  for (size_t k = 0; k < count; ++k) {
    if (x[k].defined() && y[k].defined() && y[k].is_floating_point()) {
      y[k] = mixed(x[k], y[k], decision.probability);
    }
  }
  return y;
}

at::Tensor LayerDropImpl::mixed(const at::Tensor& x, const at::Tensor& y, double probability) {
  require(x.sizes() == y.sizes(), "a block behind a LayerDrop turned shape ", x.sizes(), " into ", y.sizes(),
          "; only blocks that keep the shape can be dropped");
  return probability == 1 ? y : at::add(x, at::sub(y, x), 1.0 / probability);
}

std::vector<at::Tensor> LayerDropImpl::dropped_parameters(const Progress& window) const {
  std::vector<at::Tensor> dropped;
  std::unordered_map<const void*, int64_t> drops;  // layers, of parameters that several have
  for (int64_t i = 0; i < layers(); ++i) {
    bool kept = false;
    for (int64_t m = window.micro_step; m < window.micro_steps && !kept; ++m) {
      kept = keeps_layer(options_, i, layers(), window.step, m);
    }
    if (kept) continue;
    for (const at::Tensor& parameter : parameters_of_[static_cast<size_t>(i)]) {
      const void* key = parameter.unsafeGetTensorImpl();
      const int64_t users = users_.at(key);
      if (users == 1 || ++drops[key] == users) dropped.push_back(parameter);
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
