// Muon (K. Jordan, 2024; "Muon is Scalable for LLM Training", arXiv:2502.16982): each hidden matrix moves by
// its momentum made orthogonal; everything else takes AdamW, in the same optimizer.
//
//   pacer::Muon optimizer(pacer::muon_groups(*model, pacer::MuonOptions(3e-4).weight_decay(0.1)));
//
//   m = m + (1 - momentum) (g - m)            u = g + momentum (m - g) with Nesterov's momentum, else m
//   o = u made orthogonal, by five iterations of three matrix products (Newton, Schulz)
//   p -= lr * weight_decay * p                p -= lr * adjustment(rows, columns) * o
//
// On a GPU matrices of one shape go through one batch of products; a convolution's rows are its output channels. Values
// are those of torch.optim.Muon within the rounding of the products. Between two machines the products differ
// in their last bits, and so do the results; on one machine the same bits come again. Everything else is as
// in fused_adam.h: dtypes, parameters without a gradient, errors before anything is changed, no
// synchronisation on CUDA. A parameter that is no matrix is refused where the optimizer is made or its group
// is added, unless the group has orthogonalize(false). Over several ranks (DataParallel) each computes all of it,
// or its part (share_products); Shards give it parts, which each rank sends to the one that orthogonalises the
// matrix, and gets back. Directions take 2 bytes an element beside the momentum on a GPU, 4 on a CPU.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <pacer/optimizers/adam_param_state.h>
#include <pacer/optimizers/fused_optimizer.h>
#include <pacer/optimizers/muon_options.h>
#include <pacer/optimizers/named_parameters.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace pacer {

class Muon : public FusedOptimizerOf<MuonOptions> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;

  // From the next step on each of these ranks orthogonalises its part of the matrices and sends the results to the
  // others, in the dtype of the products: with DataParallel, where the network is faster than the products.
  // `ranks` may be all of a run, those of a node (Communicator::node), or those of a Grid that have the same
  // stage (Grid::replicas). They must have the same parameters and gradients, which the first step compares,
  // and call step() together. Null: each rank makes all of them, as at first. A matrix moves as it does without
  // this, to the bit on a CPU, and on a GPU but for the last bits of products in batches of other sizes. Throws
  // InvalidArgument where the parameters are on another device than the Communicator's tensors. Not with
  // CudaGraph.
  void share_products(std::shared_ptr<Communicator> ranks);

 protected:
  void prepare(const StepInputs& inputs) override;
  void update_only(const ParameterRanges& ranges, std::shared_ptr<Communicator> ranks) override;
};

// Sorts the trained parameters of a model into two groups for Muon: matrices, and the rest with
// orthogonalize(false). The rest is what has fewer than two dimensions, what belongs to an Embedding or an
// EmbeddingBag, the head, and all whose names begin with one of `adamw`. The head is what a module that is a
// modules::WithHead says, else the last matrix of the model in the order of registration. A group may be empty, and is then
// left out. `options` are those of both groups. Tensors that stand under several names come once.
std::vector<NamedParamGroup> muon_groups(const torch::nn::Module& model, const MuonOptions& options = {},
                                         const std::vector<std::string>& adamw = {});
// The same for OneBitMuon.
std::vector<NamedParamGroup> muon_groups(const torch::nn::Module& model, const OneBitMuonOptions& options,
                                         const std::vector<std::string>& adamw = {});

// A text of two lines, or one: which parameters take which rule.
std::string describe_muon_groups(const std::vector<NamedParamGroup>& groups);

}  // namespace pacer
