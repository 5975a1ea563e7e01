// Which matrix makes a model's outputs, where a program must know, as muon_groups does. Without an answer it is taken for
// the last matrix that the model registers, which is wrong where the head is tied to an embedding.
#pragma once

#include <ATen/core/Tensor.h>

namespace pacer::modules {

// A base of modules, beside torch::nn::Module.
class WithHead {
 public:
  virtual ~WithHead() = default;
  // The weight of the head [outputs, hidden], which may be that of an embedding, too.
  virtual const at::Tensor& head_weight() const = 0;
};

}  // namespace pacer::modules
