// Which matrix makes a model's outputs, where a program must know, as muon_groups and Shards do. Without an answer it is taken
// for the last matrix that the model registers, which is wrong where the head is tied to an embedding.
//
//   class MyModelImpl : public torch::nn::Module, public pacer::modules::WithHead {
//     const at::Tensor& head_weight() const override { return head->weight; }
//     at::Tensor loss(...) { return head_loss(hidden, targets); }
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include <pacer/modules/linear_cross_entropy.h>

namespace pacer::modules {

struct HeadExchangeSlot;

// A base of modules, beside torch::nn::Module.
class WithHead {
 public:
  WithHead();
  WithHead(const WithHead& other);
  WithHead& operator=(const WithHead& other);
  virtual ~WithHead();
  // The weight of the head [outputs, hidden], which may be that of an embedding, too.
  virtual const at::Tensor& head_weight() const = 0;

  // linear_cross_entropy(hidden, head_weight(), targets, options, row_weights). Where ranks share the weight out by rows
  // (ShardsOptions::split_head), it is computed over them: then all ranks call it alike, with as many rows each, and what
  // comes from above must be the same on all of them. If it is not, backward throws InvalidArgument on a CPU; on a GPU, which
  // is not waited for, gradients are NaN.
  at::Tensor head_loss(const at::Tensor& hidden, const at::Tensor& targets,
                       const LinearCrossEntropyOptions& options = {},
                       const at::Tensor& row_weights = {}) const;

  // For who shares out the weight; see modules/head_exchange.h. Never null, and of this object alone.
  const std::shared_ptr<HeadExchangeSlot>& head_exchange_slot() const { return slot_; }

 private:
  std::shared_ptr<HeadExchangeSlot> slot_;
};

}  // namespace pacer::modules
