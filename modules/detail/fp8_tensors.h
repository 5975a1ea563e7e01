// The tensors that a model casts to 8-bit floats in every step, with their scales and histories where they
// live, and the casts themselves. It knows no layers.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/device/detail/late_tensor.h>
#include <pacer/kernels/fp8.h>

namespace pacer::detail {

// A matrix in 8-bit floats: uint8 [rows, columns], its transpose, what products are multiplied with, fp32
// [1], and the sums of its columns before the cast, fp32 [columns]. Undefined is what was not wanted.
struct Fp8Matrix {
  at::Tensor codes, transposed, inverse, sums;
};

// What a cast makes besides codes.
struct Fp8Extras {
  bool transposed = false, sums = false;
};

class Fp8Tensors {
 public:
  // A tensor with a history, for delayed scaling.
  struct Named {
    std::string name;
    kernels::Fp8Format format;
  };
  Fp8Tensors(at::Device device, const kernels::Fp8Rule& rule, std::vector<Named> tensors);

  at::Device device() const { return device_; }

  // `x`: fp32, bf16 or fp16, [rows, columns], on the device; with the transpose both are multiples of 16.
  // `tensor`: its number among those named, whose magnitude grows if `records`; nothing: its own scale.
  Fp8Matrix cast(const at::Tensor& x, kernels::Fp8Format format, std::optional<size_t> tensor, bool records,
                 const Fp8Extras& extras);

  // As Fp8Scaling has them.
  at::Tensor amax() const;
  void set_amax(const at::Tensor& amax);
  void update(const kernels::GradientCheck* check);
  void forget();
  std::map<std::string, at::Tensor> state() const;
  void set_state(const std::map<std::string, at::Tensor>& state);

 private:
  // Memory for the measured magnitude of one cast and its inverse, both zero.
  struct Slot {
    uint32_t* measured;
    at::Tensor inverse;
  };
  Slot new_slot();
  void run(const kernels::Fp8Cast& cast) const;
  kernels::Fp8Scale* scales() const { return static_cast<kernels::Fp8Scale*>(scales_.mutable_data_ptr()); }
  uint32_t* histories() const { return static_cast<uint32_t*>(histories_.mutable_data_ptr()); }
  void learn_of_histories();

  at::Device device_;
  kernels::Fp8Rule rule_;
  std::vector<Named> tensors_;
  at::Tensor scales_;     // int32 [tensors, 5]: a kernels::Fp8Scale each
  at::Tensor histories_;  // int32 [tensors, rule_.history]
  // Those that the host knows to have a history, which need not be measured. Where it does not know yet, the
  // kernel that measures sees for itself, so that nothing depends on when it learns.
  std::vector<bool> has_history_;
  std::unique_ptr<LateTensor> counts_;
  at::Tensor slots_;
  int64_t used_slots_ = 0;
};

}  // namespace pacer::detail
