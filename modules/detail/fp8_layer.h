// One pacer::modules::Linear that computes in 8-bit floats: its tensors among those of the model, and its
// weight in 8 bits.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/custom_class_detail.h>

#include <pacer/modules/detail/fp8_tensors.h>
#include <pacer/modules/nf4_weight.h>

namespace pacer::detail {

class Fp8Layer : public torch::CustomClassHolder {
 public:
  // `input`, `gradient`: their numbers among the tensors with a history; nothing with current scaling.
  Fp8Layer(std::shared_ptr<Fp8Tensors> tensors, kernels::Fp8Format gradients, std::optional<size_t> input,
           std::optional<size_t> gradient)
      : tensors_(std::move(tensors)), gradients_(gradients), input_(input), gradient_(gradient) {}

  // What is cast for its products; `records`: it counts for the scales to come.
  Fp8Tensors::Role input(bool records) const { return {kernels::Fp8Format::e4m3, input_, records}; }
  Fp8Tensors::Role gradient(bool records) const { return {gradients_, gradient_, records}; }
  Fp8Tensors& tensors() const { return *tensors_; }
  // With its transpose. The same as before where it may be kept and nothing was written to it.
  Fp8Matrix cast_weight(const at::Tensor& weight);
  // Casts a weight in 4 bits, whose decoded values, in its dtype, live as long as that takes. Nothing of its
  // size is kept, but its largest magnitude is, since it is frozen.
  Fp8Matrix cast_weight(const modules::Nf4Weight& weight, bool transposed);
  kernels::Fp8Format gradients() const { return gradients_; }

  void forget_weight() { weight_.reset(); }
  bool holds_weight() const { return weight_.has_value(); }
  void keep_weight(bool keep) {
    keeps_weight_ = keep;
    forget_weight();
  }

  at::Device device() const { return tensors_->device(); }
  void count_other_call() { ++other_calls_; }
  int64_t other_calls() const { return other_calls_; }

 private:
  struct KeptWeight {
    Fp8Matrix matrix;
    uint32_t version;
    const void* memory;
  };
  // The largest magnitude of a weight in 4 bits, and what tells that it still is.
  struct Measured {
    at::Tensor amax;
    std::weak_ptr<modules::Nf4WeightImpl> weight;
    at::ScalarType dtype;
    uint32_t version;
    const void* memory;
  };

  std::shared_ptr<Fp8Tensors> tensors_;
  kernels::Fp8Format gradients_;
  std::optional<size_t> input_, gradient_;
  std::optional<KeptWeight> weight_;
  std::optional<Measured> measured_;
  bool keeps_weight_ = true;
  int64_t other_calls_ = 0;
};

using Fp8LayerPtr = c10::intrusive_ptr<Fp8Layer>;

}  // namespace pacer::detail
