#include <pacer/parallel/convert_sync_batch_norm.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/ops/empty.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include <pacer/collectives/agreement.h>
#include <pacer/collectives/detail/all_ranks_or_none.h>
#include <pacer/core/error.h>
#include <pacer/modules/sync_batch_norm.h>

namespace pacer {
namespace {

using modules::SyncBatchNormImpl;
using torch::nn::Module;
using torch::nn::SequentialImpl;

// A Communicator as layers see it. It need not be the one of gradients, whose order of operations is another.
class LaneExchange final : public modules::StatisticsExchange {
 public:
  LaneExchange(std::shared_ptr<Communicator> world, std::shared_ptr<Communicator> lane)
      : world_(std::move(world)), lane_(std::move(lane)) {}
  int ranks() const override { return lane_->world_size(); }
  at::Device device() const override { return lane_->device(); }
  at::Tensor all_gather(const at::Tensor& own) override {
    at::Tensor all = at::empty({ranks(), own.numel()}, own.options());
    lane_->all_gather(all, own).wait();
    return all;
  }
  void all_reduce(const at::Tensor& sum) override { lane_->all_reduce(sum).wait(); }
  void leave(const std::string& reason) noexcept override { lane_->leave(reason); }

 private:
  const std::shared_ptr<Communicator> world_;  // whose end would end the lane
  const std::shared_ptr<Communicator> lane_;
};

// A batch norm of torch in a Sequential, and what takes its place.
struct Replacement {
  SequentialImpl* sequential;
  size_t position;
  std::string child;
  std::shared_ptr<SyncBatchNormImpl> layer;
};

// The same layer over the tensors of a batch norm of torch.
template <class BatchNorm>
std::shared_ptr<SyncBatchNormImpl> same_layer(const BatchNorm& former) {
  auto layer = std::make_shared<SyncBatchNormImpl>(
      former.options, modules::BatchNormTensors{former.weight, former.bias, former.running_mean,
                                                former.running_var, former.num_batches_tracked});
  layer->train(former.is_training());
  return layer;
}

bool is_torchs(const Module& module) {
  return module.as<torch::nn::BatchNorm1dImpl>() != nullptr ||
         module.as<torch::nn::BatchNorm2dImpl>() != nullptr ||
         module.as<torch::nn::BatchNorm3dImpl>() != nullptr;
}

std::shared_ptr<SyncBatchNormImpl> same_layer_as(const Module& former) {
  if (const auto* one = former.as<torch::nn::BatchNorm1dImpl>()) return same_layer(*one);
  if (const auto* two = former.as<torch::nn::BatchNorm2dImpl>()) return same_layer(*two);
  return same_layer(*former.as<torch::nn::BatchNorm3dImpl>());
}

// What is about to be done to a model.
class Plan {
 public:
  explicit Plan(Module& model) {
    require(!is_torchs(model),
            "convert_sync_batch_norm: the model itself is a batch norm of torch::nn; make it a "
            "pacer::modules::SyncBatchNorm");
    visit(model, "");
  }

  // A fact for each layer.
  const std::vector<Fact>& facts() const { return facts_; }

  std::vector<std::string> carry_out(const std::shared_ptr<modules::StatisticsExchange>& exchange) const {
    for (SyncBatchNormImpl* layer : layers_) layer->set_exchange(exchange);
    for (const Replacement& to : replacements_) {
      *(to.sequential->begin() + static_cast<std::ptrdiff_t>(to.position)) = torch::nn::AnyModule(to.layer);
      to.sequential->replace_module(to.child, to.layer);
    }
    return names_;
  }

 private:
  void visit(Module& module, const std::string& name) {
    if (!seen_.insert(&module).second) return;
    if (auto* layer = module.as<SyncBatchNormImpl>()) add(name, *layer);
    for (const auto& item : module.named_children()) {
      const std::string child = name.empty() ? item.key() : name + "." + item.key();
      if (is_torchs(*item.value())) {
        replace(module, item.key(), child, item.value());
      } else {
        visit(*item.value(), child);
      }
    }
  }

  void add(const std::string& name, SyncBatchNormImpl& layer) {
    layers_.push_back(&layer);
    names_.push_back(name);
    const torch::nn::BatchNormOptions& options = layer.options;
    facts_.push_back(
        {"batch norm " + name,
         detail::concatenate(options.num_features(), " channels, eps ", options.eps(), ", momentum ",
                             options.momentum() ? detail::concatenate(*options.momentum()) : "none",
                             options.track_running_stats() ? "" : ", no running statistics")});
  }

  void replace(Module& owner, const std::string& key, const std::string& name,
               const std::shared_ptr<Module>& former) {
    auto* sequential = owner.as<SequentialImpl>();
    size_t position = 0;
    const size_t size = sequential == nullptr ? 0 : sequential->size();
    while (position < size && sequential->ptr(position) != former) ++position;
    require(
        position < size, "convert_sync_batch_norm: ", name,
        " is a batch norm of torch::nn outside of a "
        "torch::nn::Sequential, and the module that holds it would go on calling it; declare it there as a "
        "pacer::modules::SyncBatchNorm");
    std::shared_ptr<SyncBatchNormImpl>& layer = same_[former.get()];
    if (layer == nullptr) {
      layer = same_layer_as(*former);
      add(name, *layer);
    }
    replacements_.push_back({sequential, position, key, layer});
  }

  std::unordered_set<const Module*> seen_;
  std::unordered_map<const Module*, std::shared_ptr<SyncBatchNormImpl>> same_;  // by the former one
  std::vector<SyncBatchNormImpl*> layers_;
  std::vector<std::string> names_;
  std::vector<Fact> facts_;
  std::vector<Replacement> replacements_;
};

}  // namespace

std::vector<std::string> convert_sync_batch_norm(Module& model, std::shared_ptr<Communicator> world) {
  require(world != nullptr, "convert_sync_batch_norm needs the Communicator of the ranks; it is null");
  std::optional<Plan> plan;
  detail::on_all_ranks_or_none(*world, world->options().timeout(), "convert the batch norms of its model",
                               [&] {
                                 plan.emplace(model);
                                 return std::string();
                               });
  constexpr int64_t kBeforeTraining = -1;
  if (world->world_size() > 1) require_agreement(*world, kBeforeTraining, plan->facts());
  if (plan->facts().empty()) return {};
  const auto lane = world->lane("batch norm");
  return plan->carry_out(std::make_shared<LaneExchange>(std::move(world), lane));
}

}  // namespace pacer
