// Two optimizers over copies of the same parameters: a fused one and torch's, given the same gradients.
#pragma once

#include <utility>
#include <vector>

#include "support/optimizers/optimizers.h"

namespace pacer::testing {

template <class Optimizer>
class Twins {
 public:
  enum Ownership { kCopyBoth, kKeepOurs };
  using TorchOptions = OptionsOf<PeerOf<Optimizer>>;

  // kKeepOurs: the fused optimizer gets the very tensors, with whatever is odd about their memory.
  Twins(const std::vector<Tensor>& parameters, const TorchOptions& options, Ownership ownership = kCopyBoth)
      : ours(ownership == kKeepOurs ? parameters : clones(parameters)),
        theirs(clones(parameters)),
        optimizer(ours, options),
        peer(theirs, options) {}

  void step() {
    optimizer.step();
    peer.step();
  }
  void step_with_random_gradients() {
    set_random_gradients(ours, theirs);
    step();
  }
  void clear_gradient(size_t i) { ours[i].mutable_grad() = theirs[i].mutable_grad() = Tensor(); }
  void add(const Tensor& parameter) {
    ours.push_back(clones({parameter})[0]);
    theirs.push_back(clones({parameter})[0]);
    optimizer.param_groups()[0].params().push_back(ours.back());
    peer.param_groups()[0].params().push_back(theirs.back());
  }
  double apart() const { return distance(ours, theirs); }

  std::vector<Tensor> ours, theirs;
  Optimizer optimizer;
  PeerOf<Optimizer> peer;
};

}  // namespace pacer::testing
