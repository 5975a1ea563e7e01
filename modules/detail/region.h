// A region of a model that keeps its arguments only and runs again in backward: the node of the graph behind
// recompute.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/custom_class_detail.h>

#include <pacer/modules/detail/call_context.h>
#include <pacer/modules/detail/defined_mask.h>
#include <pacer/modules/detail/region_buffers.h>
#include <pacer/modules/detail/replay_memory.h>
#include <pacer/modules/kept_operators.h>
#include <pacer/modules/tensor_call.h>

namespace pacer::detail {

class Region : public torch::CustomClassHolder {
 public:
  Region(torch::nn::Module& module, std::string name, TensorFunction f, const Tensors& x,
         const KeptOperators& kept);

  const std::string& name() const { return name_; }
  // Each once, also where modules share them. They are inputs of the node, so each gradient arrives once.
  const Tensors& parameters() const { return parameters_; }

  // x and results are defined tensors; results() tells where others belong.
  Tensors run_first(const Tensors& x);
  const DefinedMask& results() const { return results_; }
  // Does the first part of run_again now, unless it is done; the rest must follow before anything else runs.
  void replay(const Tensors& x);
  // Gradients of x and of the parameters, undefined where `is_needed` is false or nothing depends on it.
  Tensors run_again(const Tensors& x, const Tensors& gradients, const std::vector<bool>& is_needed);

 private:
  // A second run whose gradients are still to come. Buffers are put back when it ends.
  struct Replay {
    explicit Replay(const RegionBuffers& kept) : buffers(kept) {}
    const RegionBuffers::AsBefore buffers;
    Tensors leaves, y;
  };

  void check_unchanged() const;
  Tensors checked_results(Tensors y, const Tensors& gradients) const;
  void check_reach(const Tensors& y, const Tensors& x) const;

  std::string name_;
  TensorFunction f_;
  std::shared_ptr<torch::nn::Module> module_;  // null where no shared_ptr holds it
  bool was_training_;
  Tensors parameters_;
  std::vector<int64_t> versions_;  // of the parameters
  RegionBuffers buffers_;
  DefinedMask results_;
  CallContext context_;
  ReplayMemory memory_;
  std::unique_ptr<Replay> replay_;  // under way
};

}  // namespace pacer::detail
