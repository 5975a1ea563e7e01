// The contenders of a case: pacer's optimizer and the ways LibTorch offers for the same step, each over its
// own copy of the parameters and moments. Gradients are shared, because every contender only reads them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "cases.h"
#include "support/fused_adamw.h"

namespace bench::kernels {

// Parameters as they start and their gradients, random and never zero, each tensor an allocation of its own.
struct ModelData {
  std::vector<at::Tensor> initial;
  std::vector<at::Tensor> gradients;
};

ModelData make_model_data(const ModelShapes& model, Work work, at::Device device);

// One way to do the work.
struct Contender {
  std::function<void()> step;
  std::vector<at::Tensor> results;  // what is compared: the parameters, or the norm
};

struct ContenderPlan {
  std::string name;
  std::string meaning;  // what exactly one step is
  double tolerance;     // of the relative error of its results
  std::function<Contender(const ModelData&)> make;
};

// First pacer's, then its peers.
std::vector<ContenderPlan> contender_plans(Work work, Device device);

// The same for every contender.
constexpr AdamWSettings kSettings;
constexpr double kSgdMomentum = 0.9;

// Copies of the initial parameters, for one contender.
std::vector<at::Tensor> own_parameters(const ModelData& data);

// Steps of AdamW written with LibTorch's operators, as its Python optimizers call them, on any device.
Contender make_fused(const ModelData& data);
Contender make_checked_fused(const ModelData& data);
// fp32 masters and moments behind bf16 parameters; with `upcast` the step also converts the gradients to
// fp32.
Contender make_fused_master(const ModelData& data, bool upcast);
Contender make_foreach(const ModelData& data);
Contender make_foreach_norm(const ModelData& data);

// A step of SGD with at::_fused_sgd_.
Contender make_fused_sgd(const ModelData& data);

// LAMB, which LibTorch does not have: one tensor after the other, and all tensors in each operator.
Contender make_lamb_loop(const ModelData& data);
Contender make_lamb_foreach(const ModelData& data);

// The norm kernels have no class of their own in the library, so their contenders are built here. CPU only.
Contender make_norm_on_cpu(const ModelData& data);
// Throws pacer::Unavailable in a build without CUDA.
Contender make_norm_on_cuda(const ModelData& data);

// Steps taken before results are compared; they also warm up.
constexpr int kComparedSteps = 3;

// What results are compared with, and where they started.
struct Reference {
  std::vector<at::Tensor> results;
  std::vector<at::Tensor> start;  // empty: zero
};

// Results known without any contender; where there are none, the list is empty and those of the first peer
// count.
Reference exact_reference(Work work, const ModelData& data);

// Throws pacer::Error unless ||results - reference|| / ||reference - start|| is within the tolerance of the
// plan, which is what its dtypes explain. NaN never is.
void require_agreement(const ContenderPlan& plan, const Contender& contender, const Reference& reference);

}  // namespace bench::kernels
