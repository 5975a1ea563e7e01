// The modules of a model, and which of its tensors no training changes.
#pragma once

#include <memory>
#include <string>
#include <unordered_set>

#include <c10/util/Exception.h>  // ordered_dict.h needs it and does not say so
#include <torch/csrc/api/include/torch/ordered_dict.h>
#include <torch/nn/module.h>

namespace pacer::detail {

// With the model itself where a shared_ptr holds it; LibTorch throws for one that none holds.
inline torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> named_modules_of(
    const torch::nn::Module& model) {
  return model.named_modules(/*name_prefix=*/"", /*include_self=*/!model.weak_from_this().expired());
}

// The buffers of its weights in 4 bits, by TensorImpl.
std::unordered_set<const void*> nf4_buffers(const torch::nn::Module& model);

}  // namespace pacer::detail
