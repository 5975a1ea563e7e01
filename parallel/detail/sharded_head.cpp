#include <pacer/parallel/detail/sharded_head.h>

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>

#include <pacer/core/error.h>
#include <pacer/modules/embedding.h>

namespace pacer::detail {
namespace {

// With another number of rows.
at::Tensor rows_like(const at::Tensor& x, int64_t rows) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.front() = rows;
  return at::empty(sizes, x.options().requires_grad(false));
}

using Modules = std::unordered_set<const torch::nn::Module*>;

Modules modules_of(const torch::nn::Module& model) {
  Modules found = {&model};
  for (const auto& module : model.modules(/*include_self=*/false)) found.insert(module.get());
  return found;
}

// Whether it is the parameter of one of them, which is no embedding.
bool is_of_one_layer(const Modules& all, const at::Tensor& parameter) {
  std::vector<const torch::nn::Module*> owners;
  for (const torch::nn::Module* module : all) {
    const auto own = module->parameters(/*recurse=*/false);
    const bool is_own =
        std::any_of(own.begin(), own.end(), [&](const at::Tensor& one) { return one.is_same(parameter); });
    if (is_own) owners.push_back(module);
  }
  return owners.size() == 1 && !modules::is_embedding(*owners.front());
}

}  // namespace

const modules::WithHead& only_head(const torch::nn::Module& model) {
  const modules::WithHead* found = nullptr;
  const Modules all = modules_of(model);
  for (const torch::nn::Module* module : all) {
    const auto* const with_head = dynamic_cast<const modules::WithHead*>(module);
    if (with_head == nullptr) continue;
    require(found == nullptr,
            "ShardsOptions::split_head is for a model with one head, and several of its modules are a "
            "modules::WithHead; leave split_head out");
    found = with_head;
  }
  require(
      found != nullptr,
      "ShardsOptions::split_head needs a model that tells its head; let it be a modules::WithHead, too, as "
      "CausalLm is, and make its loss with head_loss()");
  const at::Tensor& weight = found->head_weight();
  require(weight.defined() && weight.dim() == 2,
          "ShardsOptions::split_head needs a head whose weight is a matrix; leave split_head out");
  require(
      is_of_one_layer(all, weight),
      "ShardsOptions::split_head needs a head with a weight of its own, and this one is an embedding's or "
      "that of "
      "several modules, as where the head is tied to the embedding, which reads rows of other ranks; leave "
      "split_head out");
  return *found;
}

ShardedHead::ShardedHead(std::shared_ptr<ParameterShards> shards, std::shared_ptr<Communicator> ranks,
                         const at::Tensor& weight)
    : shards_(std::move(shards)), ranks_(std::move(ranks)), width_(weight.size(1)) {
  const auto& parts = shards_->parts();
  const auto found = std::find_if(parts.begin(), parts.end(), [&](const ParameterShards::Part& one) {
    return one.parameter.is_same(weight);
  });
  part_ = static_cast<size_t>(found - parts.begin());
}

at::Tensor ShardedHead::gathered(const at::Tensor& x, const CollectiveOptions& options) {
  at::Tensor all = rows_like(x, x.size(0) * ranks());
  ranks_->all_gather(all, x.contiguous(), options).wait();
  return all;
}

at::Tensor ShardedHead::reduce_scatter(const at::Tensor& x) {
  at::Tensor sum = rows_like(x, x.size(0) / ranks());
  ranks_->reduce_scatter(sum, x).wait();
  return sum;
}

}  // namespace pacer::detail
