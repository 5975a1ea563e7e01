// Matrices of one batch of which each rank has a part: their ways to the ranks that orthogonalise them, and back.
#pragma once

#include <cstdint>
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
  // One end of a message.
  struct Way {
    at::Tensor memory;
    int peer;
  };
  std::vector<Way> sent_, received_;  // by gather(); scatter() goes the other way
  std::vector<at::Tensor> parts_,
      in_whole_;  // of matrices that are this rank's own, and their places in these
};

}  // namespace pacer::detail
