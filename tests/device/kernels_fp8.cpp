// 8-bit floats on a GPU have the bytes of the CPU: codes, transposes, amax and scales.
#include "support/catch.h"

#include <ATen/ops/from_blob.h>
#include <torch/types.h>

#include <pacer/device/detail/stream.h>

#include "support/both_devices.h"
#include "support/fp8_reference.h"

namespace pacer::testing::kernels_fp8_gpu {
namespace {

using kernels::Fp8Cast;
using kernels::Fp8Format;
using kernels::Fp8Scale;

const at::Device kGpu("cuda:0");
constexpr Fp8Format kFormats[] = {Fp8Format::e4m3, Fp8Format::e5m2};

struct Codes {
  Tensor plain, transposed, amax;
};

// On the device of `x`.
Codes cast(const Tensor& x, float scale, Fp8Format format, bool transposes) {
  const auto options = x.options().dtype(at::kByte);
  Codes codes{at::empty(x.sizes(), options), at::empty({x.size(1), x.size(0)}, options),
              at::zeros({1}, options.dtype(at::kInt))};
  const Tensor factor = at::full({1}, scale, options.dtype(at::kFloat));
  Fp8Cast work{fp8_source(x.scalar_type()), x.const_data_ptr(), x.size(0), x.size(1), format};
  work.scale = factor.const_data_ptr<float>();
  work.codes = codes.plain.mutable_data_ptr<uint8_t>();
  if (transposes) work.transposed = codes.transposed.mutable_data_ptr<uint8_t>();
  if (!transposes) codes.transposed = Tensor();
  work.amax = static_cast<uint32_t*>(codes.amax.mutable_data_ptr());
  if (x.is_cuda()) {
    kernels::fp8_cast_cuda(work, detail::current_stream(x.device()));
  } else {
    kernels::fp8_cast_cpu(work, 0, x.size(0));
  }
  return codes;
}

void compare(const Tensor& x, float scale, Fp8Format format, bool transposes) {
  const Codes wanted = cast(x, scale, format, transposes),
              found = cast(x.to(kGpu), scale, format, transposes);
  REQUIRE(found.plain.cpu().equal(wanted.plain));
  REQUIRE(found.amax.cpu().equal(wanted.amax));
  if (transposes) REQUIRE(found.transposed.cpu().equal(wanted.transposed));
}

}  // namespace

TEST_CASE("on a GPU every number becomes the 8-bit float of the CPU", "[gpu][fp8]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const Tensor x = dtype == at::kFloat ? telling_floats() : all_numbers(dtype);
    for (const Fp8Format format : kFormats) {
      for (const float scale : fp8_scales()) {
        CAPTURE(dtype, format == Fp8Format::e4m3, scale);
        compare(x.view({2, -1}), scale, format, false);
      }
    }
  }
}

TEST_CASE("on a GPU transposed codes and amax are those of the CPU, at all sizes", "[gpu][fp8]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(1);
  const std::vector<std::pair<int64_t, int64_t>> sizes = {
      {16, 16}, {16, 144}, {128, 128}, {144, 112}, {64, 400}, {4096, 16}, {16, 4096}, {0, 16}, {272, 2064}};
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto& [rows, columns] : sizes) {
      CAPTURE(dtype, rows, columns);
      const Tensor x = torch::randn({rows, columns}).to(dtype);
      for (const Fp8Format format : kFormats) compare(x, 3.0f, format, true);
    }
    for (const auto& [rows, columns] : {std::pair{1, 1}, {3, 5}, {7, 1000}}) {
      compare(torch::randn({rows, columns}).to(dtype), 3.0f, Fp8Format::e4m3, false);
    }
  }
  const Tensor odd = torch::randn({16, 24}, kGpu);
  CHECK_THROWS_WITH(cast(odd, 1, Fp8Format::e4m3, true), Catch::Matchers::ContainsSubstring("16 x 24"));
  const Tensor shifted = torch::randn({33}, kGpu).narrow(0, 1, 32).view({2, 16});
  CHECK_THROWS_WITH(cast(shifted, 1, Fp8Format::e4m3, false),
                    Catch::Matchers::ContainsSubstring("multiple of 16 bytes"));
}

TEST_CASE("on a GPU scales are updated as on the CPU, and not where a step is skipped", "[gpu][fp8]") {
  PACER_NEEDS_GPU();
  constexpr int64_t kTensors = 1000;
  const kernels::Fp8Rule rule;
  std::vector<Fp8Scale> scales(kTensors);
  std::vector<uint32_t> histories(kTensors * rule.history);
  const auto bytes = [](const void* memory, size_t count) {
    return at::from_blob(const_cast<void*>(memory), {static_cast<int64_t>(count)}, at::kByte).clone();
  };
  const auto bytes_of = [&](const auto& list) { return bytes(list.data(), list.size() * sizeof(list[0])); };
  Tensor on_gpu = bytes_of(scales).to(kGpu), histories_on_gpu = bytes_of(histories).to(kGpu);
  torch::manual_seed(2);
  for (int step = 0; step < 40; ++step) {
    const bool is_skipped = step % 7 == 3;
    const Tensor amax = torch::randn({kTensors}).exp();
    for (int64_t i = 0; i < kTensors; ++i) {
      Fp8Scale& scale = scales[static_cast<size_t>(i)];
      scale.format = kFormats[i % 2];
      scale.amax = (i + step) % 11 == 0   ? 0
                   : (i + step) % 13 == 0 ? 0x7F800000u
                                          : kernels::magnitude_bits(amax[i].item<float>());
    }
    on_gpu.copy_(bytes_of(scales));
    kernels::GradientCheck check;
    check.non_finite = is_skipped;
    const Tensor check_on_gpu = bytes(&check, sizeof check).to(kGpu);
    kernels::fp8_update_cuda(reinterpret_cast<Fp8Scale*>(on_gpu.data_ptr()),
                             reinterpret_cast<uint32_t*>(histories_on_gpu.data_ptr()), kTensors, rule,
                             reinterpret_cast<const kernels::GradientCheck*>(check_on_gpu.data_ptr()),
                             detail::current_stream(kGpu));
    for (size_t i = 0; i < scales.size(); ++i) {
      if (is_skipped) scales[i].amax = 0;
      kernels::fp8_update(scales[i], histories.data() + i * rule.history, rule);
    }
    REQUIRE(on_gpu.cpu().equal(bytes_of(scales)));
    REQUIRE(histories_on_gpu.cpu().equal(bytes_of(histories)));
  }
}

}  // namespace pacer::testing::kernels_fp8_gpu
