#include "cases.h"

namespace bench::kernels {

const WorkFacts& facts_of(Work work) {
  static const std::vector<WorkFacts> all = {
      {Work::fp32, "fp32", "AdamW, fp32", 28, 60, at::kFloat, 1e-5},
      {Work::fp32_checked, "fp32-checked", "finite check + AdamW, fp32", 32, 60, at::kFloat, 1e-5},
      {Work::norm, "norm", "norm and finite check alone, fp32", 4, 24, at::kFloat, 1e-6},
      {Work::fp64, "fp64", "AdamW, fp64", 56, 88, at::kDouble, 1e-11},
      // Rounding to bf16 differs where two results straddle the middle between two bf16 numbers.
      {Work::bf16_master, "bf16-master", "AdamW, bf16 + fp32 master", 28, 64, at::kBFloat16, 1e-2},
      {Work::bf16_remainder, "bf16-remainder", "AdamW, bf16 + 16-bit remainder", 26, 64, at::kBFloat16, 1e-2},
      // The reference rounds to nearest.
      {Work::bf16_stochastic, "bf16-stochastic", "AdamW, bf16, stochastic rounding", 22, 60, at::kBFloat16,
       5e-2},
      {Work::bf16, "bf16", "AdamW, pure bf16", 14, 40, at::kBFloat16, 5e-2},
      {Work::lamb, "lamb", "LAMB, fp32", 40, 72, at::kFloat, 1e-5},
      // The reference has moments in 32 bits.
      {Work::fp32_8bit, "fp32-8bit", "AdamW, fp32, moments in 8 bits", 16.25, 60, at::kFloat, 5e-2},
      {Work::bf16_remainder_8bit, "bf16-remainder-8bit", "AdamW, bf16 + 16-bit remainder, moments in 8 bits",
       14.25, 64, at::kBFloat16, 5e-2},
      {Work::bf16_24_8bit, "bf16-24-8bit", "AdamW, bf16 + 8-bit correction, moments in 8 bits", 12.25, 64,
       at::kBFloat16, 5e-2},
      {Work::sgd, "sgd", "SGD with momentum, fp32", 20, 44, at::kFloat, 1e-5},
      {Work::rmsprop, "rmsprop", "RMSprop with momentum, fp32", 28, 48, at::kFloat, 1e-5},
  };
  return all[static_cast<size_t>(work)];
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const auto add = [&](Device device, ModelShapes (*model)(), Work work, bool quick) {
    const std::string name =
        std::string(device == Device::cpu ? "cpu/" : "cuda/") + model().name + "/" + facts_of(work).name;
    cases.push_back({device, model, work, quick, name});
  };

  for (const Work work : {Work::fp32, Work::fp32_checked, Work::norm, Work::bf16_remainder, Work::bf16_master,
                          Work::bf16_stochastic, Work::bf16, Work::fp64, Work::lamb, Work::fp32_8bit,
                          Work::bf16_remainder_8bit, Work::bf16_24_8bit, Work::sgd, Work::rmsprop}) {
    add(Device::cpu, gpt2, work, work == Work::fp32 || work == Work::norm);
  }
  add(Device::cpu, many_small, Work::fp32, true);

  for (const auto model : {gpt2, bert_large, gpt2_xl, one_tensor}) {
    for (const Work work :
         {Work::fp32, Work::bf16, Work::bf16_master, Work::bf16_remainder, Work::bf16_stochastic,
          Work::fp32_checked, Work::norm, Work::lamb, Work::fp32_8bit, Work::bf16_remainder_8bit,
          Work::bf16_24_8bit, Work::sgd, Work::rmsprop}) {
      add(Device::cuda, model, work, model == gpt2);
    }
  }
  add(Device::cuda, many_small, Work::fp32, true);
  add(Device::cuda, many_small, Work::bf16, true);
  add(Device::cuda, many_small, Work::lamb, true);
  return cases;
}

}  // namespace bench::kernels
