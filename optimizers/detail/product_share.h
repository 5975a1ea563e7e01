// How ranks that have the same gradients share the products of a Muon: each orthogonalises some matrices and sends
// them to the others. It belongs to the StepEngine, whose tables ask it for their part.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/communicator.h>
#include <pacer/optimizers/detail/parameter_entry.h>

namespace pacer::detail {

class ProductShare {
 public:
  explicit ProductShare(std::shared_ptr<Communicator> ranks);

  Communicator& ranks() const { return *ranks_; }

  // Begins anew, with nothing dealt out.
  void forget();
  // Deals out `count` matrices that cost so much each. Rank r takes those from the returned number r to number
  // r + 1. What is left over goes to the ranks that have least to do. Alike on all ranks.
  std::vector<int64_t> deal(int64_t count, double cost);
  // Once after a new plan: ranks compare their matrices and gradients, because what they send is worth
  // something only where these are the same. Waits for a GPU. Throws CommunicationError on every rank where
  // they differ.
  void agree(const std::vector<ParameterEntry>& entries, const std::vector<char>& taking_part);
  // `values` are `bounds.back()` rows, of which this rank has made those that were dealt out to it; the others'
  // come in. Nothing of them may be touched before the end of it.
  Work gather(const at::Tensor& values, const std::vector<int64_t>& bounds) const;

 private:
  std::shared_ptr<Communicator> ranks_;
  std::vector<double> loads_;  // by rank
  bool has_agreed_ = false;
};

}  // namespace pacer::detail
