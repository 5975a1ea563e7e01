// Matrices of one batch of which each rank has a part: their ways to the ranks that orthogonalise them, and back.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/communicator.h>

namespace pacer::detail {

class MatrixParts {
 public:
  // A matrix: `own`, a vector, is what this rank has of it, elements bounds[rank] ... bounds[rank + 1] - 1. `whole` is
  // the vector of all its elements on the rank that orthogonalises it, which is `owner`, and undefined on the
  // others. All ranks add the same matrices in the same order.
  void add(const Communicator& ranks, const at::Tensor& own, const std::vector<int64_t>& bounds, int owner,
           const at::Tensor& whole);

  // Parts of all ranks become whole where their owner is.
  Work gather(Communicator& ranks) const;
  // And what owners have, parts again.
  Work scatter(Communicator& ranks) const;

 private:
  // Memory of this rank where parts travel from, or to.
  struct Places {
    std::vector<std::pair<at::Tensor, int>> elsewhere;  // with the rank that has the other end
    std::vector<at::Tensor> here;                       // the other end is here, too, in the same order
  };
  static Work travel(Communicator& ranks, const Places& from, const Places& to);

  Places parts_, wholes_;  // of what this rank has, and of matrices that it orthogonalises
};

}  // namespace pacer::detail
