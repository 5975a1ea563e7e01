// The part of a model that a rank of a pipeline has: its blocks, and what the first and the last stage need
// beside them. The rest of the model keeps its names, shapes and dtypes on this rank, but no memory; whoever
// touches a tensor of it gets a sentence that says where it is.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/modules/blocks.h>
#include <pacer/optimizers/named_parameters.h>
#include <pacer/parallel/pipeline_plan.h>

namespace pacer::detail {

// A parameter that several ranks of a pipeline use. The first of them updates it, from the sum of all their
// gradients.
struct TiedParameter {
  std::string name;
  at::Tensor parameter;
  std::vector<int> ranks;  // ascending; of the pipeline
};

// How the model is cut, the same on all ranks.
struct StageCut {
  PipelineSchedule schedule;
  std::vector<int64_t> bounds;     // stage s has the blocks bounds[s] ... bounds[s + 1] - 1
  std::vector<std::string> first;  // names of modules, parameters and buffers that the first stage uses
  std::vector<std::string> last;   // the same for the last stage

  // Throws InvalidArgument where the bounds do not share out so many blocks.
  void validate(int64_t blocks) const;
  // The bounds of stages whose numbers of blocks differ by one at most; the earlier ones have more.
  static std::vector<int64_t> even(int64_t blocks, int64_t stages);
};

class StageModel {
 public:
  // Moves this rank's part to `device` and releases the rest. Throws InvalidArgument, changing nothing, for
  // names that nothing in the model has, and for tensors that are neither in a block nor named.
  StageModel(torch::nn::Module& model, const Blocks& blocks, StageCut cut, int rank, at::Device device);

  const StageCut& cut() const { return cut_; }
  int64_t first_block(int64_t stage) const { return cut_.bounds[static_cast<size_t>(stage)]; }
  int64_t end_block(int64_t stage) const { return cut_.bounds[static_cast<size_t>(stage) + 1]; }

  // The parameters that this rank updates, with their names in the model, in its order.
  const NamedParameters& parameters() const { return parameters_; }
  // Those that this rank uses and others use, too.
  const std::vector<TiedParameter>& tied() const { return tied_; }
  // The tensors of the model that this rank has not, by TensorImpl.
  const std::unordered_set<const void*>& elsewhere() const { return elsewhere_; }

 private:
  StageCut cut_;
  NamedParameters parameters_;
  std::vector<TiedParameter> tied_;
  std::unordered_set<const void*> elsewhere_;
};

}  // namespace pacer::detail
