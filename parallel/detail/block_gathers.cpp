#include <pacer/parallel/detail/block_gathers.h>

#include <algorithm>
#include <utility>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <pacer/core/error.h>
#include <pacer/modules/replayed.h>

namespace pacer::detail {
namespace {

// Where the parameters were there already, somebody else needs them longer.
class ReleaseAtEnd {
 public:
  ReleaseAtEnd(ParameterShards& shards, size_t group, bool releases)
      : shards_(shards), group_(group), releases_(releases) {}
  ReleaseAtEnd(const ReleaseAtEnd&) = delete;
  ~ReleaseAtEnd() {
    if (releases_) shards_.release(group_);
  }

 private:
  ParameterShards& shards_;
  size_t group_;
  bool releases_;
};

}  // namespace

BlockGathers::BlockGathers(std::shared_ptr<ParameterShards> shards, size_t groups,
                           BlockGathersOptions options)
    : shards_(std::move(shards)),
      options_(options),
      has_parameters_(groups),
      has_frozen_(groups),
      has_fp32_(groups) {
  for (const ParameterShards::Part& part : shards_->parts()) {
    has_parameters_[part.group] = 1;
    if (!part.gradient.defined()) has_frozen_[part.group] = 1;
    if (part.parameter.scalar_type() == at::kFloat) has_fp32_[part.group] = 1;
  }
}

void BlockGathers::begin_forward(std::vector<size_t> expected) {
  expected_ = std::move(expected);
  order_ = std::make_shared<Order>();
  if (!expected_.empty()) gather_ahead(expected_.front());
}

void BlockGathers::begin_backward() {
  if (!order_->empty()) gather_ahead(order_->back());
}

void BlockGathers::gather_ahead(size_t group) {
  shards_->gather_ahead(group, static_cast<size_t>(options_.prefetch));
}

Tensors BlockGathers::run(size_t group, const TensorFunction& block, const Tensors& x) {
  if (!shards_->keeps_parts()) return block(x);
  const bool with_graph = at::GradMode::is_enabled();
  const Visit visit = replayed(&has_frozen_[group], Visit{order_, order_->size()});
  if (with_graph && region_is_running()) return run_again(visit, group, block, x);
  order_->push_back(group);
  const bool needs_backward = with_graph || region_is_running();
  const bool was_there = shards_->is_gathered(group);
  shards_->gather(group);
  const ReleaseAtEnd release(*shards_, group, !was_there && !(options_.keep_after_forward && needs_backward));
  auto next = std::upper_bound(expected_.begin(), expected_.end(), group);
  for (int64_t i = 0; i < options_.prefetch && next != expected_.end(); ++i) gather_ahead(*next++);
  if (!with_graph) return block(x);
  warn_of_autocast(group);
  Tensors in = x;
  const auto use = std::make_shared<Use>(Use{visit, group, 0, 0});
  watch(in, use);
  const Tensors y = block(in);
  for (const at::Tensor& result : y) {
    const bool is_argument = std::any_of(
        in.begin(), in.end(), [&](const at::Tensor& argument) { return argument.is_same(result); });
    if (!result.defined() || !result.requires_grad() || is_argument) continue;
    result.register_hook([self = shared_from_this(), use](const at::Tensor&) { self->enter_backward(*use); });
  }
  return y;
}

// In backward, in the second run of a region: its own backward follows at once.
Tensors BlockGathers::run_again(const Visit& visit, size_t group, const TensorFunction& block, Tensors x) {
  const auto use = std::make_shared<Use>(Use{visit, group, 0, 0});
  watch(x, use);
  enter_backward(*use);
  return block(x);
}

// Before any node of the block runs; also once more for each further result.
void BlockGathers::enter_backward(Use& use) {
  const bool is_first = use.awaited == 0;
  if (is_first) use.awaited = use.passes;
  shards_->gather_until_landed(use.group, is_first ? use.passes : 0);
  const Order& order = *use.visit.order;
  for (int64_t i = 1; i <= options_.prefetch && static_cast<size_t>(i) <= use.visit.position; ++i) {
    gather_ahead(order[use.visit.position - static_cast<size_t>(i)]);
  }
}

// Frozen parameters are read until the gradients of the block's arguments are there, which become views that
// are the block's alone.
void BlockGathers::watch(Tensors& x, const std::shared_ptr<Use>& use) {
  if (!has_frozen_[use->group]) return;
  for (at::Tensor& argument : x) {
    if (!argument.defined() || !argument.requires_grad()) continue;
    argument = argument.view_as(argument);
    argument.register_hook([self = shared_from_this(), use](const at::Tensor&) {
      if (use->awaited > 0) --use->awaited;
      self->shards_->passed(use->group);
    });
    ++use->passes;
  }
}

void BlockGathers::warn_of_autocast(size_t group) {
  if (!warns_of_autocast_ || !has_fp32_[group]) return;
  const at::DeviceType device = shards_->parts().front().parameter.device().type();
  if (!at::autocast::is_autocast_enabled(device)) return;
  warns_of_autocast_ = false;
  TORCH_WARN(
      "Shards releases the fp32 parameters of each block after forward, but autocast keeps a 16-bit copy of "
      "them for backward, half of what was saved; use a bf16 model (model->to(torch::kBFloat16)), or "
      "Recompute, too");
}

Tensors GatherWrapper::run(const BlockCall& call, const TensorFunction& rest, const Tensors& x) {
  require(call.index < blocks_, "Shards knows ", blocks_, " blocks and no block ", call.index,
          "; add all blocks before Session::use");
  return gathers_->run(first_group_ + call.index, rest, x);
}

}  // namespace pacer::detail
