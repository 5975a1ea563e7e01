// What Shards does around blocks: the parameters of a block come before it runs, forward or backward, and
// leave behind it; those of the next one are on their way meanwhile.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <pacer/modules/blocks.h>
#include <pacer/parallel/parameter_shards.h>

namespace pacer::detail {

struct BlockGathersOptions {
  int64_t prefetch = 1;             // blocks ahead
  bool keep_after_forward = false;  // until backward
};

class BlockGathers : public std::enable_shared_from_this<BlockGathers> {
 public:
  BlockGathers(std::shared_ptr<ParameterShards> shards, size_t groups, BlockGathersOptions options);

  // The groups whose blocks the coming forward pass is expected to run, in order; those that it does not run
  // cost time only.
  void begin_forward(std::vector<size_t> expected);
  void begin_backward();
  // The groups that the forward pass has used, in order.
  const std::vector<size_t>& used() const { return *order_; }
  bool has_parameters(size_t group) const { return has_parameters_[group] != 0; }
  // Runs a block, whose parameters are that group.
  Tensors run(size_t group, const TensorFunction& block, const Tensors& x);

 private:
  // The groups in the order in which a forward pass used them: backward goes through them from the end.
  using Order = std::vector<size_t>;
  // A use in forward.
  struct Visit {
    std::shared_ptr<const Order> order;
    size_t position;
  };

  // The same as backward sees it.
  struct Use {
    Visit visit;
    size_t group;
    size_t passes;   // arguments whose gradients are waited for
    size_t awaited;  // of them, in the backward under way
  };

  Tensors run_again(const Visit& visit, size_t group, const TensorFunction& block, Tensors x);
  void enter_backward(Use& use);
  void gather_ahead(size_t group);
  void watch(Tensors& x, const std::shared_ptr<Use>& use);
  void warn_of_autocast(size_t group);

  const std::shared_ptr<ParameterShards> shards_;
  const BlockGathersOptions options_;
  std::vector<char> has_parameters_, has_frozen_, has_fp32_;  // by group: any, and such ones
  bool warns_of_autocast_ = true;
  std::vector<size_t> expected_;
  std::shared_ptr<Order> order_ = std::make_shared<Order>();  // of the forward pass under way
};

// For the blocks of one stack.
class GatherWrapper : public BlockWrapper {
 public:
  // The groups of its blocks are first_group, ...
  GatherWrapper(std::shared_ptr<BlockGathers> gathers, size_t first_group, size_t blocks)
      : gathers_(std::move(gathers)), first_group_(first_group), blocks_(blocks) {}
  Tensors run(const BlockCall& call, const TensorFunction& rest, const Tensors& x) override;

 private:
  const std::shared_ptr<BlockGathers> gathers_;
  const size_t first_group_, blocks_;
};

}  // namespace pacer::detail
