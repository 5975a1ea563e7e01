// A model's head whose weight Shards deals out by its rows: each rank computes with those that it has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include <torch/nn/module.h>

#include <pacer/collectives/communicator.h>
#include <pacer/modules/head_exchange.h>
#include <pacer/modules/with_head.h>
#include <pacer/parallel/parameter_shards.h>

namespace pacer::detail {

// The module that tells the model's head. InvalidArgument where there is none or more than one, and where its weight is that of
// another module, too.
const modules::WithHead& only_head(const torch::nn::Module& model);

class ShardedHead : public modules::HeadExchange {
 public:
  // `weight`: a parameter of `shards` that is split by rows over `ranks`.
  ShardedHead(std::shared_ptr<ParameterShards> shards, std::shared_ptr<Communicator> ranks,
              const at::Tensor& weight);

  int ranks() const override { return ranks_->world_size(); }
  int rank() const override { return ranks_->rank(); }
  bool is_whole() const override { return shards_->is_gathered(part().group); }
  bool is_trained() const override { return part().gradient.defined(); }
  at::Tensor columns() const override { return part().values.view({-1, width_}); }
  int64_t first_column() const override { return part().first / width_; }
  at::Tensor all_gather(const at::Tensor& x) override {
    return gathered(x, CollectiveOptions().agreed(true));
  }
  at::Tensor compare_and_gather(const at::Tensor& x) override { return gathered(x, {}); }
  at::Tensor reduce_scatter(const at::Tensor& x) override;
  void add_gradient(const at::Tensor& gradient) override { shards_->add_part_gradient(part_, gradient); }

 private:
  const ParameterShards::Part& part() const { return shards_->parts()[part_]; }
  at::Tensor gathered(const at::Tensor& x, const CollectiveOptions& options);

  const std::shared_ptr<ParameterShards> shards_;
  const std::shared_ptr<Communicator> ranks_;
  const int64_t width_;  // elements of a row
  size_t part_;
};

}  // namespace pacer::detail
