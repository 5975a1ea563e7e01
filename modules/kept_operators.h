// Operators whose results a recomputed region keeps from its first run, so that its second run does not compute them
// again (selective activation checkpointing): the dear ones, as attention and matrix products are. Everything else
// runs again.
//
//   session.use(pacer::Recompute(model->blocks, pacer::RecomputeOptions().keep(pacer::KeptOperators::attention())));
//   auto y = pacer::recompute(*block, pacer::KeptOperators({"aten::mm", "aten::addmm"}), &BlockImpl::forward, x);
//
// An operator is called by its name in LibTorch's dispatcher, namespace::name or namespace::name.overload: "aten::mm",
// "aten::add.Tensor". It is kept where it reaches a device's kernel: "aten::linear" is made of others and never does,
// "aten::addmm" and "aten::mm" do. An operator that a region does not run costs nothing, so a list may name the ones of
// all devices. Results take their memory from forward until backward hands them out; numbers are those of plain
// recomputation to the bit, also for random ones (dropout), after which the generators go on as in the first run.
#pragma once

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

namespace pacer {
namespace detail {
struct OperatorList;
}  // namespace detail

class KeptOperators {
 public:
  // Keeps nothing: all of a region runs again.
  KeptOperators() = default;
  // Throws InvalidArgument for a name that LibTorch does not know, and for an operator that changes an argument in place,
  // gives a view of one or no tensor, or is made of other operators.
  KeptOperators(std::initializer_list<std::string> names);
  explicit KeptOperators(const std::vector<std::string>& names);

  // What at::scaled_dot_product_attention runs on CPUs and GPUs where it does not take attention apart: the flash,
  // memory-efficient and cuDNN kernels. Keeps [batch, heads, sequence, channels] a call, and a number a row.
  static KeptOperators attention();
  // Matrix products, also of Linear layers and of batches: mm, addmm, bmm and baddbmm.
  static KeptOperators products();

  std::vector<std::string> names() const;
  bool empty() const { return list_ == nullptr; }
  // For regions; null where nothing is kept.
  const std::shared_ptr<const detail::OperatorList>& list() const { return list_; }

 private:
  std::shared_ptr<const detail::OperatorList> list_;
};

}  // namespace pacer
