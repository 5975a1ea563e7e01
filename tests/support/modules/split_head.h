// A head whose weight threads of this process have in parts, as ranks do, on a CPU or all on one GPU.
#pragma once

#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <pacer/modules/head_exchange.h>
#include <pacer/modules/with_head.h>

#include "support/collectives/ranks.h"
#include "support/modules/loss_passes.h"

namespace pacer::testing {

// What travels goes over the CPU, where threads are joined.
class ThreadExchange : public modules::HeadExchange {
 public:
  // Rank r has rows bounds[r] to bounds[r + 1] of the weight.
  ThreadExchange(std::shared_ptr<Communicator> world, const torch::Tensor& weight,
                 const std::vector<int64_t>& bounds, bool is_trained)
      : world_(std::move(world)), is_trained_(is_trained) {
    const auto r = static_cast<size_t>(world_->rank());
    first_ = bounds[r];
    columns_ = weight.narrow(0, first_, bounds[r + 1] - first_).clone();
  }
  int ranks() const override { return world_->world_size(); }
  int rank() const override { return world_->rank(); }
  bool is_whole() const override { return false; }
  bool is_trained() const override { return is_trained_; }
  torch::Tensor columns() const override { return columns_; }
  int64_t first_column() const override { return first_; }
  torch::Tensor all_gather(const torch::Tensor& x) override { return compare_and_gather(x); }
  torch::Tensor compare_and_gather(const torch::Tensor& x) override {
    if (is_alone) return torch::cat(std::vector<torch::Tensor>(static_cast<size_t>(ranks()), x));
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.front() *= ranks();
    const torch::Tensor all = torch::empty(sizes, x.options().device(at::kCPU));
    world_->all_gather(all, x.cpu().contiguous()).wait();
    return all.to(x.device());
  }
  torch::Tensor reduce_scatter(const torch::Tensor& x) override {
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.front() /= ranks();
    const torch::Tensor sum = torch::empty(sizes, x.options().device(at::kCPU));
    world_->reduce_scatter(sum, x.cpu()).wait();
    return sum.to(x.device());
  }
  void add_gradient(const torch::Tensor& added) override {
    gradient = gradient.defined() ? gradient + added : added;
  }

  torch::Tensor gradient;  // that was added
  // What this rank gives is what all give. For backward on a GPU, which has one thread of autograd, so that ranks that share it
  // cannot wait there for each other.
  bool is_alone = false;

 private:
  const std::shared_ptr<Communicator> world_;
  const bool is_trained_;
  int64_t first_;
  torch::Tensor columns_;
};

struct OnlyHead : modules::WithHead {
  explicit OnlyHead(torch::Tensor value) : weight(std::move(value)) {}
  const torch::Tensor& head_weight() const override { return weight; }
  torch::Tensor weight;
};

// One pass of each rank over its own rows; `weight` of a result is the gradient of the rank's columns, `scale` what the loss is
// multiplied with. Empty messages where nothing was thrown.
struct SplitPasses {
  std::vector<LossPass> passes;
  std::vector<std::string> messages;
};
inline SplitPasses split_passes(const std::vector<LossCase>& of_ranks, const std::vector<int64_t>& bounds,
                                const std::vector<double>& scales, bool is_trained = true) {
  const auto ranks = static_cast<int>(of_ranks.size());
  const Ranks worlds =
      Communicator::in_process(ranks, CommunicatorOptions().timeout(std::chrono::seconds(20)));
  SplitPasses result;
  result.passes.resize(of_ranks.size());
  result.messages = run_ranks(ranks, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const LossCase& of = of_ranks[r];
    const auto exchange = std::make_shared<ThreadExchange>(worlds[r], of.weight, bounds, is_trained);
    // Nobody reads it.
    OnlyHead head(torch::full_like(of.weight, std::numeric_limits<double>::quiet_NaN()));
    head.weight.requires_grad_(is_trained);
    head.head_exchange_slot()->exchange = exchange;
    const torch::Tensor hidden = of.hidden.detach().clone().requires_grad_();
    const torch::Tensor loss = head.head_loss(hidden, of.targets, of.options, of.row_weights);
    exchange->is_alone = of.hidden.is_cuda();
    (loss * scales[r]).backward();
    if (head.weight.grad().defined()) throw std::logic_error("the weight got a gradient of its own");
    result.passes[r] = {loss.detach(), hidden.grad(), exchange->gradient};
  });
  return result;
}

}  // namespace pacer::testing
