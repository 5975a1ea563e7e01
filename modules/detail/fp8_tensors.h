// The tensors that a model casts to 8-bit floats in every step, with their scales and histories where they
// live, and the casts themselves. It knows no layers.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <pacer/device/detail/host_copy.h>
#include <pacer/kernels/fp8.h>
#include <pacer/modules/detail/matrix.h>

namespace pacer::detail {

// False for a GPU that multiplies no 8-bit floats, which is one before compute capability 8.9.
bool multiplies_8_bits(at::Device device);

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

  // How a tensor is scaled: by its number among those named, whose magnitude grows if `records`; without a
  // number by its own magnitude, which need not be measured where it is known: `amax`, fp32 [], on the
  // device.
  struct Role {
    kernels::Fp8Format format;
    std::optional<size_t> tensor;
    bool records = false;
    at::Tensor amax = {};
  };
  // `x`: fp32, bf16 or fp16, [rows, columns], on the device; with the transpose both are multiples of 16. One
  // matrix, or three of one shape and dtype that stand side by side, of which nothing is dropped.
  Fp8Matrix cast(at::TensorList x, const Role& role, const Fp8Extras& extras,
                 const kernels::Dropout& dropout = {});
  // The same for a tensor [rows, columns] that a kernel makes: `make` runs it with that target, where it must
  // be measured a first time without codes. With the transpose the kernel makes it, too.
  using Make = std::function<void(const kernels::Fp8Target&)>;
  Fp8Matrix encode(int64_t rows, int64_t columns, const Role& role, bool transposed, const Make& make);
  // [columns, rows] of codes [rows, columns].
  at::Tensor transposed(const at::Tensor& codes) const;

  // These do what Fp8Scaling's functions of the same names do.
  at::Tensor amax() const;
  void set_amax(const at::Tensor& amax);
  void update(const kernels::GradientCheck* check);
  void forget();
  void mark();
  void forget_since_mark();
  void record(bool on) { records_ = on; }
  std::map<std::string, at::Tensor> state() const;
  void set_state(const std::map<std::string, at::Tensor>& state);

 private:
  // Memory for the measured magnitude of one cast and its inverse, both zero.
  struct Measurement {
    uint32_t* measured;
    at::Tensor inverse;
  };
  Measurement new_measurement();
  void run(const kernels::Fp8Cast& cast) const;
  kernels::Fp8Scale* scales() const { return static_cast<kernels::Fp8Scale*>(scales_.mutable_data_ptr()); }
  uint32_t* histories() const { return static_cast<uint32_t*>(histories_.mutable_data_ptr()); }
  void learn_of_histories();

  at::Device device_;
  kernels::Fp8Rule rule_;
  std::vector<Named> tensors_;
  at::Tensor scales_;     // int32 [tensors, 5]: a kernels::Fp8Scale each
  at::Tensor histories_;  // int32 [tensors, rule_.history]
  at::Tensor marked_;     // amax(), when mark() was called; undefined: zeros
  bool records_ = true;
  // Those that the host knows to have a history, which need not be measured. Where it does not know yet, the
  // kernel that measures sees for itself, so that nothing depends on when it learns.
  std::vector<bool> has_history_;
  std::unique_ptr<HostCopy> counts_;
  at::Tensor measurements_;
  int64_t used_measurements_ = 0;
};

}  // namespace pacer::detail
