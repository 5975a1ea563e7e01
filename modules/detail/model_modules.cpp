#include <pacer/modules/detail/model_modules.h>

#include <pacer/modules/nf4_weight.h>

namespace pacer::detail {

std::unordered_set<const void*> nf4_buffers(const torch::nn::Module& model) {
  std::unordered_set<const void*> codes;
  for (const auto& module : model.modules(/*include_self=*/false)) {
    const auto* weight = module->as<modules::Nf4WeightImpl>();
    if (weight == nullptr) continue;
    for (const at::Tensor& buffer : weight->buffers()) codes.insert(buffer.unsafeGetTensorImpl());
  }
  return codes;
}

}  // namespace pacer::detail
