#include <pacer/schedulers/layer_drop.h>

#include <unordered_map>

#include <ATen/ops/add.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/where.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>

namespace pacer {

LayerDropImpl::LayerDropImpl(LayerDropOptions options) : options_(std::move(options)) {
  layer_drop_theta(options_, {});  // which refuses what is out of range
}

LayerDropImpl::LayerDropImpl(Blocks blocks, LayerDropOptions options) : LayerDropImpl(std::move(options)) {
  blocks_ = std::move(blocks);
  require(!blocks_.is_empty() && blocks_->size() > 0,
          "LayerDrop was given Blocks without a block; add the blocks before it is made");
  for (const auto& block : *blocks_) add(*block);
  depth_share(options_, 0, layers());  // which refuses options for another number of layers
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
  const double probability = keep_probability(options_, i, layers(), progress);
  return {options_.per_sample() || keeps_layer(options_, i, layers(), progress), probability, i, progress};
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
    if (!x[k].defined() || !y[k].defined()) continue;
    if (y[k].is_floating_point() || options_.per_sample()) y[k] = mixed(decision, x[k], y[k]);
  }
  return y;
}

at::Tensor LayerDropImpl::mixed(const Decision& decision, const at::Tensor& x, const at::Tensor& y) const {
  require(x.sizes() == y.sizes(), "a block behind a LayerDrop turned shape ", x.sizes(), " into ", y.sizes(),
          "; only blocks that keep the shape can be dropped");
  if (decision.probability == 1) return y;
  if (options_.per_sample()) return mixed_rows(decision, x, y);
  return at::add(x, at::sub(y, x), 1.0 / decision.probability);
}

at::Tensor LayerDropImpl::mixed_rows(const Decision& decision, const at::Tensor& x,
                                     const at::Tensor& y) const {
  require(x.dim() > 0, "layer ", decision.layer,
          " behind a LayerDrop with per_sample has a tensor without dimensions; give it one with a row for "
          "each sample");
  const at::ScalarType dtype = x.scalar_type();
  require(c10::canCast(y.scalar_type(), dtype), "a block behind a LayerDrop with per_sample turned ", dtype,
          " into ", y.scalar_type(), "; only blocks that keep the kind of numbers can be dropped by row");
  if (!c10::isFloatingType(dtype) && !c10::isComplexType(dtype)) {
    return at::where(kept_rows(decision, x, at::kBool), y.to(dtype), x);
  }
  // The mask has zeros and ones, which are exact in every dtype; the factor is multiplied in fp32 or wider.
  const bool any = keep_threshold(decision.probability) > 0;
  const double scale = any ? 1.0 / decision.probability : 0;
  return at::addcmul(x, at::sub(y, x), kept_rows(decision, x, dtype), scale).to(dtype);
}

// Returns 1 for rows of x that keep what the layer adds, else 0, on x's device, in the shape [rows, 1, 1 ...].
at::Tensor LayerDropImpl::kept_rows(const Decision& decision, const at::Tensor& x,
                                    at::ScalarType dtype) const {
  const bool on_gpu = x.is_cuda();
  require<Error>(!on_gpu || !detail::is_capturing(x.device()),
                 "a LayerDrop with per_sample in a captured CUDA graph would drop the same rows in every "
                 "replay; capture without it, or leave the forward pass outside");
  std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
  shape[0] = x.size(0);
  at::Tensor mask = at::empty({shape[0]}, at::TensorOptions().dtype(at::kFloat));
  auto* values = mask.mutable_data_ptr<float>();
  for (const bool kept : keeps_rows(options_, decision.layer, layers(), decision.progress, rank_, shape[0])) {
    *values++ = kept ? 1.0F : 0.0F;
  }
  mask = mask.to(dtype).view(shape);
  return on_gpu ? mask.pin_memory().to(x.device(), /*non_blocking=*/true) : mask.to(x.device());
}

std::vector<at::Tensor> LayerDropImpl::dropped_parameters(const Progress& window) const {
  std::vector<at::Tensor> dropped;
  if (options_.per_sample()) return dropped;
  std::unordered_map<const void*, int64_t> drops;  // layers, of parameters that several have
  for (int64_t i = 0; i < layers(); ++i) {
    bool kept = false;
    Progress each = window;
    for (; each.micro_step < window.micro_steps && !kept; ++each.micro_step) {
      kept = keeps_layer(options_, i, layers(), each);
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
  if (options_.per_sample()) {
    double expected = 0;
    for (int64_t i = 0; i < layers(); ++i) expected += keep_probability(options_, i, layers(), window);
    return expected;
  }
  int64_t kept = 0;
  for (int64_t i = 0; i < layers(); ++i) {
    Progress each = window;
    for (each.micro_step = 0; each.micro_step < window.micro_steps; ++each.micro_step) {
      kept += keeps_layer(options_, i, layers(), each);
    }
  }
  return static_cast<double>(kept) / static_cast<double>(window.micro_steps);
}

}  // namespace pacer
