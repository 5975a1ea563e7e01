// NF4 on a GPU has the bytes of the CPU: codes, scales, the offset, and what is decoded.
#include "support/catch.h"

#include <array>
#include <limits>

#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <torch/types.h>

#include <pacer/device/detail/stream.h>

#include "support/both_devices.h"
#include "support/kernels/fp8_reference.h"
#include "support/kernels/nf4_reference.h"

namespace pacer::testing::kernels_nf4_gpu {
namespace {

using kernels::Nf4Codes;

const at::Device kGpu("cuda:0");
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

// Numbers in 4 bits on either device. All memory is filled with 0xAA before.
struct Nf4Tensors {
  Nf4Tensors(int64_t n, bool is_nested, at::Device device) : count(n), nested(is_nested) {
    const auto bytes = [&](int64_t size) {
      return at::full({size}, 0xAA, at::TensorOptions().dtype(at::kByte).device(device));
    };
    codes = bytes(kernels::nf4_bytes(n));
    scales = bytes(4 * kernels::nf4_blocks(n));
    if (!nested) return;
    scale_codes = bytes(kernels::nf4_blocks(n));
    nested_scales = bytes(4 * kernels::nf4_nested_blocks(n));
    offset = bytes(4);
    auto map = kernels::nf4_nested_map();
    nested_map = at::from_blob(map.data(), {256}, at::kFloat).clone().to(device);
  }
  Nf4Codes view() const {
    Nf4Codes view;
    view.codes = codes.mutable_data_ptr<uint8_t>();
    view.count = count;
    if (nested) {
      view.absmax_codes = scale_codes.mutable_data_ptr<uint8_t>();
      view.nested_absmax = static_cast<float*>(nested_scales.mutable_data_ptr());
      view.nested_map = nested_map.const_data_ptr<float>();
      view.offset = static_cast<float*>(offset.mutable_data_ptr());
    } else {
      view.absmax = static_cast<float*>(scales.mutable_data_ptr());
    }
    return view;
  }
  bool has_bytes_of(const Nf4Tensors& other) const {
    return codes.cpu().equal(other.codes.cpu()) && scales.cpu().equal(other.scales.cpu()) &&
           (!nested ||
            (scale_codes.cpu().equal(other.scale_codes.cpu()) &&
             nested_scales.cpu().equal(other.nested_scales.cpu()) && offset.cpu().equal(other.offset.cpu())));
  }

  int64_t count;
  bool nested;
  Tensor codes, scales, scale_codes, nested_scales, nested_map, offset;
};

Nf4Tensors quantized(const Tensor& x, bool nested) {
  Nf4Tensors to(x.numel(), nested, x.device());
  auto* const scratch = static_cast<float*>(to.scales.mutable_data_ptr());
  const auto type = element_type_of(x.scalar_type());
  if (x.is_cuda()) {
    kernels::nf4_quantize_cuda(x.const_data_ptr(), type, to.view(), scratch, detail::current_stream(kGpu));
  } else {
    kernels::nf4_quantize_cpu(x.const_data_ptr(), type, to.view(), scratch);
  }
  return to;
}

// Between rows, and behind the last one, lie sevens.
Tensor decoded(const Nf4Tensors& from, at::ScalarType dtype, int64_t columns, int64_t stride) {
  const int64_t rows = columns == 0 ? 0 : pacer::ceil_divide(from.count, columns);
  const Tensor out = at::full({rows * stride}, 7, from.codes.options().dtype(dtype));
  if (out.is_cuda()) {
    kernels::nf4_decode_cuda(from.view(), element_type_of(dtype), out.mutable_data_ptr(), columns, stride,
                             detail::current_stream(kGpu));
  } else {
    kernels::nf4_decode_cpu(from.view(), element_type_of(dtype), out.mutable_data_ptr(), columns, stride, 0,
                            kernels::nf4_blocks(from.count));
  }
  return out;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.cpu().view(at::kByte).equal(b.cpu().view(at::kByte));
}

// Also that a second run gives the same.
void compare(const Tensor& x) {
  const Tensor on_gpu = x.to(kGpu);
  for (const bool nested : {false, true}) {
    CAPTURE(nested);
    const Nf4Tensors wanted = quantized(x, nested), found = quantized(on_gpu, nested);
    REQUIRE(found.has_bytes_of(wanted));
    REQUIRE(quantized(on_gpu, nested).has_bytes_of(wanted));
    for (const at::ScalarType dtype : kDtypes) {
      CAPTURE(dtype);
      REQUIRE(same_bits(decoded(found, dtype, x.numel(), x.numel()),
                        decoded(wanted, dtype, x.numel(), x.numel())));
    }
  }
}

Tensor numbers(int64_t count, at::ScalarType dtype) {
  std::vector<float> x = nf4_numbers(count);
  return at::from_blob(x.data(), {count}, at::kFloat).to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

TEST_CASE("on a GPU codes, scales and what is decoded are those of the CPU, at all sizes", "[gpu][nf4]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : kDtypes) {
    for (const int64_t count : kNf4Counts) {
      CAPTURE(dtype, count);
      compare(numbers(count, dtype));
    }
  }
  compare(numbers(int64_t{5000011}, at::kBFloat16));
}

TEST_CASE("on a GPU numbers around every threshold have the codes of the CPU", "[gpu][nf4]") {
  PACER_NEEDS_GPU();
  std::vector<float> values;
  for (const float threshold : kNf4ReferenceThresholds) {
    float value = threshold;
    for (int k = 0; k < 10; ++k) value = std::nextafter(value, -2.0f);
    for (int k = 0; k < 20; ++k) values.push_back(value = std::nextafter(value, 2.0f));
  }
  for (int i = -300000; i <= 300000; ++i) values.push_back(static_cast<float>(i) / 3e5f);
  std::vector<float> x;
  for (const float value : values) {
    if (x.size() % 64 == 0) x.push_back(x.size() % 128 == 0 ? 1.0f : -1.0f);  // what the block is scaled by
    x.push_back(value);
  }
  const Tensor all = at::from_blob(x.data(), {static_cast<int64_t>(x.size())}, at::kFloat).clone();
  for (const double scale : {1.0, 3.7e-5, 1e-37, 1e-39, 1e-43, 2e38}) {
    CAPTURE(scale);
    compare((all * scale).contiguous());
  }
}

TEST_CASE("on a GPU what is not finite is stored as on the CPU and decodes to NaN", "[gpu][nf4]") {
  PACER_NEEDS_GPU();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const at::ScalarType dtype : kDtypes) {
    for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      const Tensor x = numbers(20001, dtype);
      x[70] = bad;
      const Nf4Tensors plain = quantized(x, false), on_gpu = quantized(x.to(kGpu), false);
      REQUIRE(on_gpu.has_bytes_of(plain));
      const Tensor values = decoded(on_gpu, at::kFloat, 20001, 20001).cpu();
      REQUIRE(values.isnan().equal(decoded(plain, at::kFloat, 20001, 20001).isnan()));
      REQUIRE(values.isnan().sum().item<int64_t>() == 64);
      const Nf4Tensors nested = quantized(x.to(kGpu), true);
      REQUIRE(nested.codes.cpu().equal(plain.codes));
      REQUIRE(decoded(nested, at::kFloat, 20001, 20001).isnan().all().item<bool>());
    }
  }
}

TEST_CASE("on a GPU rows that lie apart leave what is between them alone", "[gpu][nf4]") {
  PACER_NEEDS_GPU();
  for (const auto& [rows, columns, stride] : {std::array<int64_t, 3>{5, 7, 9},
                                              {40, 100, 101},
                                              {30, 4096, 4112},
                                              {999, 8, 16},
                                              {1000, 24, 28},
                                              {2001, 1, 3},
                                              {1, 70001, 70002},
                                              {1025, 1023, 1024}}) {
    const Tensor x = numbers(rows * columns, at::kFloat);
    for (const bool nested : {false, true}) {
      for (const at::ScalarType dtype : kDtypes) {
        CAPTURE(rows, columns, stride, nested, dtype);
        REQUIRE(same_bits(decoded(quantized(x.to(kGpu), nested), dtype, columns, stride),
                          decoded(quantized(x, nested), dtype, columns, stride)));
      }
    }
  }
}

TEST_CASE("on a GPU memory that is not aligned is refused", "[gpu][nf4]") {
  PACER_NEEDS_GPU();
  const auto stream = detail::current_stream(kGpu);
  const Tensor x = at::full({129}, 1.0f, at::TensorOptions().device(kGpu));
  const Nf4Tensors to(128, false, kGpu);
  const auto says = Catch::Matchers::ContainsSubstring("multiple of 16 bytes");
  CHECK_THROWS_WITH(kernels::nf4_quantize_cuda(x.const_data_ptr<float>() + 1, kernels::ElementType::f32,
                                               to.view(), nullptr, stream),
                    says);
  CHECK_THROWS_WITH(kernels::nf4_decode_cuda(to.view(), kernels::ElementType::f32,
                                             x.mutable_data_ptr<float>() + 1, 128, 128, stream),
                    says);
}

}  // namespace pacer::testing::kernels_nf4_gpu
