// What data parallelism must equal, in one process: a hook that takes the micro-steps of the other ranks, one
// rank after the other, and adds their gradients in rank order; over nodes, those of each node first. It
// knows nothing of communicators or buckets.
#pragma once

#include <utility>
#include <vector>

#include <pacer/hooks/session_parts.h>

#include "support/session/small_model.h"

namespace pacer::testing {

class ShardReference : public Hook {
 public:
  // `per_node`: how many ranks a node has; 0: all.
  ShardReference(SmallModel model, int world_size, int per_node = 0)
      : model_(std::move(model)), world_size_(world_size), per_node_(per_node > 0 ? per_node : world_size) {}

  std::string hook_name() const override { return "shard_reference"; }
  Slot slot() const override { return Slot::reduce; }
  void attach(SessionParts& parts) override { parts_ = &parts; }

  void gradients_ready(const Progress& window) override {
    const std::vector<Tensor> parameters = model_->parameters();
    std::vector<Tensor> sums(parameters.size()), of_node = take_gradients(parameters);
    for (int rank = 1; rank < world_size_; ++rank) {
      std::vector<Tensor> of_rank(parameters.size());
      for (int64_t m = 0; m < window.micro_steps; ++m) {
        micro_step(window, m, rank);
        add(of_rank, widened(take_gradients(parameters)));
      }
      for (size_t i = 0; i < of_rank.size(); ++i) {
        if (of_rank[i].defined()) of_rank[i] = of_rank[i].to(parameters[i].scalar_type());
      }
      if (rank % per_node_ == 0) add(sums, std::exchange(of_node, std::vector<Tensor>(sums.size())));
      add(of_node, of_rank);
    }
    add(sums, of_node);
    for (size_t i = 0; i < sums.size(); ++i) {
      parameters[i].mutable_grad() = sums[i].defined() ? sums[i] : torch::zeros_like(parameters[i]);
    }
    parts_->window.weight *= world_size_;
    parts_->window.tokens *= world_size_;
  }

 private:
  static void add(std::vector<Tensor>& sums, const std::vector<Tensor>& gradients) {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < sums.size(); ++i) {
      if (gradients[i].defined()) sums[i] = sums[i].defined() ? sums[i] + gradients[i] : gradients[i];
    }
  }

  // Micro-batches add up in fp32 where gradients have 16 bits.
  static std::vector<Tensor> widened(std::vector<Tensor> gradients) {
    for (Tensor& gradient : gradients) {
      if (gradient.defined() && gradient.element_size() == 2) gradient = gradient.to(torch::kFloat);
    }
    return gradients;
  }

  static std::vector<Tensor> take_gradients(const std::vector<Tensor>& parameters) {
    std::vector<Tensor> gradients;
    for (const Tensor& parameter : parameters) {
      gradients.push_back(std::exchange(parameter.mutable_grad(), Tensor()));
    }
    return gradients;
  }

  void micro_step(const Progress& window, int64_t m, int rank) {
    Progress progress = window;
    progress.micro_step = m;
    const auto [ids, targets] = small_batch((window.step * parts_->micro_steps + m) * world_size_ + rank);
    MicroBatch batch;
    batch.tensors = {ids.to(parts_->device()), targets.to(parts_->device())};
    Progress begun = progress;  // micro-step 0 would say that the window was given up
    begun.micro_step += rank * window.micro_steps;
    for (const auto& hook : parts_->hooks()) hook->begin(begun, batch);
    for (const auto& hook : parts_->hooks()) hook->forward_begin(progress);
    Tensor loss = model_->loss(batch.tensors[0], batch.tensors[1]);
    for (const auto& hook : parts_->hooks()) hook->forward_end();
    const double weight = parts_->window.weight / static_cast<double>(window.micro_steps);
    if (weight != 1) loss = loss * weight;
    for (const auto& hook : parts_->hooks()) loss = hook->scale_loss(loss);
    loss.backward();
  }

  SmallModel model_;
  int world_size_, per_node_;
  SessionParts* parts_ = nullptr;
};

}  // namespace pacer::testing
