// How a language model's head computes where its weight lies in parts: each rank has some of its rows, makes the logits of
// these columns for the hidden states of all ranks, and adds up their gradients itself. Hidden states travel, the weight does
// not. modules/with_head.h uses one; Shards makes it (ShardsOptions::split_head).
#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

namespace pacer::modules {

// All ranks make the same calls in the same order. Tensors are contiguous and on the weight's device.
class HeadExchange {
 public:
  virtual ~HeadExchange() = default;
  // The number of ranks, this one included, and this one's, from 0.
  virtual int ranks() const = 0;
  virtual int rank() const = 0;
  // The whole weight is here at the moment: each rank computes its loss by itself.
  virtual bool is_whole() const = 0;
  // Whether the weight has a gradient.
  virtual bool is_trained() const = 0;
  // The rows of the weight that are this rank's, [columns, in], without a graph; none are allowed. The first of them is column
  // first_column() of the logits.
  virtual at::Tensor columns() const = 0;
  virtual int64_t first_column() const = 0;
  // x [n, ...], of the same shape on every rank -> those of all, [ranks() * n, ...], in rank order.
  virtual at::Tensor all_gather(const at::Tensor& x) = 0;
  // The same, after a look at whether shapes are the same; InvalidArgument or CommunicationError where they are not.
  virtual at::Tensor compare_and_gather(const at::Tensor& x) = 0;
  // x [ranks() * n, ...] -> the sum over ranks of this rank's n rows. Compared, too.
  virtual at::Tensor reduce_scatter(const at::Tensor& x) = 0;
  // In backward: the gradient of columns(), of the losses of all ranks together.
  virtual void add_gradient(const at::Tensor& gradient) = 0;
};

// Where a model keeps its exchange, if it has one. A copy of a model has a weight of its own, and so an empty one.
struct HeadExchangeSlot {
  std::shared_ptr<HeadExchange> exchange;
};

}  // namespace pacer::modules
