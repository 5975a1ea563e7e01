// 8-bit floats on a GPU have the bytes of the CPU: codes, transposes, amax, sums of columns and scales.
#include "support/catch.h"

#include <ATen/ops/from_blob.h>
#include <torch/types.h>

#include <pacer/device/detail/stream.h>

#include "support/both_devices.h"
#include "support/kernels/fp8_reference.h"

namespace pacer::testing::kernels_fp8_gpu {
namespace {

using kernels::Fp8Cast;
using kernels::Fp8Format;
using kernels::Fp8Scale;

const at::Device kGpu("cuda:0");
constexpr Fp8Format kFormats[] = {Fp8Format::e4m3, Fp8Format::e5m2};

struct Codes {
  Tensor plain, transposed;
  Tensor inverse;   // fp32
  Tensor measured;  // where it was wanted
  Tensor state;     // the bytes of a Fp8Scale
  Tensor sums;      // of columns, where they were wanted
};

void run(const Fp8Cast& work, const Tensor& x) {
  if (x.is_cuda()) {
    kernels::fp8_cast_cuda(work, detail::current_stream(x.device()));
  } else {
    kernels::fp8_cast_cpu(work, 0, x.size(0));
  }
}

// How a matrix is cast, besides its scale.
struct How {
  Fp8Format format = Fp8Format::e4m3;
  bool transposes = false, sums = false, drops = false;
};

// On the device of `x`, with `others` beside it. A scale of 0: that of the tensor itself.
Codes cast(const Tensor& x, float scale, const How& how, const std::vector<Tensor>& others = {}) {
  const int64_t rows = x.size(0), columns = x.size(1) * static_cast<int64_t>(1 + others.size());
  const auto options = x.options().dtype(at::kByte);
  const Fp8Scale state = scale == 0 ? Fp8Scale{} : fp8_scale_of(scale);
  Codes codes;
  codes.state =
      at::from_blob(const_cast<Fp8Scale*>(&state), {sizeof state}, at::kByte).clone().to(x.device());
  codes.plain = at::empty({rows, columns}, options);
  codes.inverse = at::zeros({1}, options.dtype(at::kFloat));
  codes.measured = at::zeros({1}, options.dtype(at::kInt));
  Fp8Cast work{element_type_of(x.scalar_type()), x.const_data_ptr(), rows, columns, {}};
  for (size_t i = 0; i < others.size(); ++i) work.beside[i] = others[i].const_data_ptr();
  if (how.drops) work.dropout = kernels::dropout_of(0.25, 5);
  const Tensor partials = at::full({kernels::fp8_parts(rows), columns}, 7, options.dtype(at::kFloat));
  if (how.sums) {
    codes.sums = at::full({columns}, 7, options.dtype(at::kFloat));
    work.partials = partials.mutable_data_ptr<float>();
    work.column_sums = codes.sums.mutable_data_ptr<float>();
  }
  work.to.format = how.format;
  work.to.state = static_cast<Fp8Scale*>(codes.state.mutable_data_ptr());
  work.to.measured = static_cast<uint32_t*>(codes.measured.mutable_data_ptr());
  work.to.inverse = codes.inverse.mutable_data_ptr<float>();
  run(work, x);
  work.to.codes = codes.plain.mutable_data_ptr<uint8_t>();
  if (how.transposes) {
    codes.transposed = at::empty({columns, rows}, options);
    work.to.transposed = codes.transposed.mutable_data_ptr<uint8_t>();
  }
  run(work, x);
  return codes;
}

void compare(const Tensor& x, float scale, const How& how) {
  const Codes wanted = cast(x, scale, how), found = cast(x.to(kGpu), scale, how);
  REQUIRE(found.plain.cpu().equal(wanted.plain));
  REQUIRE(found.measured.cpu().equal(wanted.measured));
  REQUIRE(found.state.cpu().equal(wanted.state));
  REQUIRE(found.inverse.cpu().view(at::kInt).equal(wanted.inverse.view(at::kInt)));
  if (how.transposes) REQUIRE(found.transposed.cpu().equal(wanted.transposed));
  if (how.sums) REQUIRE(found.sums.cpu().view(at::kInt).equal(wanted.sums.view(at::kInt)));
}

}  // namespace

TEST_CASE("on a GPU every number becomes the 8-bit float of the CPU", "[gpu][fp8]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const Tensor x = dtype == at::kFloat ? telling_floats() : all_numbers(dtype);
    for (const Fp8Format format : kFormats) {
      for (const float scale : fp8_scales()) {
        CAPTURE(dtype, format == Fp8Format::e4m3, scale);
        compare(x.view({2, -1}), scale, {format});
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
      for (const Fp8Format format : kFormats) {
        for (const float scale : {3.0f, 0.0f}) {
          for (const int kinds : {0, 1, 2, 3}) {
            CAPTURE(kinds);
            compare(x, scale, {format, true, kinds % 2 != 0, kinds / 2 != 0});
          }
        }
      }
    }
    for (const auto& [rows, columns] : {std::pair{1, 1}, {3, 5}, {7, 1000}}) {
      for (const float scale : {3.0f, 0.0f}) {
        compare(torch::randn({rows, columns}).to(dtype), scale, {});
      }
    }
    for (const auto& [rows, columns] : {std::pair{1, 4}, {3, 12}, {7, 1000}, {5, 8196}}) {
      compare(torch::randn({rows, columns}).to(dtype), 3.0f, {Fp8Format::e4m3, false, false, true});
    }
    for (const auto& [rows, columns] : {std::pair{1, 8}, {129, 24}, {1501, 136}}) {
      for (const bool drops : {false, true}) {
        compare(torch::randn({rows, columns}).to(dtype), 3.0f, {Fp8Format::e5m2, false, true, drops});
      }
    }
  }
  const Tensor odd = torch::randn({16, 24}, kGpu);
  CHECK_THROWS_WITH(cast(odd, 1, {Fp8Format::e4m3, true}), Catch::Matchers::ContainsSubstring("16 x 24"));
  const Tensor shifted = torch::randn({33}, kGpu).narrow(0, 1, 32).view({2, 16});
  CHECK_THROWS_WITH(cast(shifted, 1, {}), Catch::Matchers::ContainsSubstring("multiple of 16 bytes"));
  const Tensor narrow = torch::randn({16, 12}, kGpu);
  CHECK_THROWS_WITH(cast(narrow, 1, {Fp8Format::e4m3, false, true}),
                    Catch::Matchers::ContainsSubstring("multiple of 8, not 12"));
}

TEST_CASE("on a GPU matrices side by side are cast as one", "[gpu][fp8]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(7);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto& [rows, width] : {std::pair{16, 16}, {160, 48}, {528, 4096}}) {
      CAPTURE(dtype, rows, width);
      std::vector<Tensor> x;
      for (int i = 0; i < 3; ++i) x.push_back((torch::randn({rows, width}) * (i + 1)).to(kGpu, dtype));
      const Tensor whole = at::cat(x, 1);
      for (const auto& [transposes, sums] : {std::pair{true, true}, {true, false}, {false, false}}) {
        const How how{Fp8Format::e5m2, transposes, sums, false};
        const Codes wanted = cast(whole, 0, how), found = cast(x[0], 0, how, {x[1], x[2]});
        REQUIRE(found.plain.equal(wanted.plain));
        REQUIRE(found.inverse.equal(wanted.inverse));
        REQUIRE(found.measured.equal(wanted.measured));
        if (transposes) REQUIRE(found.transposed.equal(wanted.transposed));
        if (sums) REQUIRE(found.sums.equal(wanted.sums));
      }
    }
  }
}

TEST_CASE("on a GPU columns are summed as on the CPU where nothing is cast, and from run to run",
          "[gpu][fp8]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(6);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto& [rows, columns] : {std::pair{1, 8}, {300, 40}, {4096, 272}, {0, 16}}) {
      CAPTURE(dtype, rows, columns);
      const Tensor x = torch::randn({rows, columns}).to(dtype), on_gpu = x.to(kGpu);
      const Tensor wanted = fp8_column_sums(x);
      for (int repetition = 0; repetition < 2; ++repetition) {
        const auto options = on_gpu.options().dtype(at::kFloat);
        const Tensor sums = at::full({columns}, 7, options);
        const Tensor partials = at::full({kernels::fp8_parts(rows), columns}, 7, options);
        Fp8Cast work{element_type_of(dtype), on_gpu.const_data_ptr(), rows, columns, {}};
        work.partials = partials.mutable_data_ptr<float>();
        work.column_sums = sums.mutable_data_ptr<float>();
        run(work, on_gpu);
        REQUIRE(sums.cpu().equal(wanted));
      }
    }
  }
}

TEST_CASE("on a GPU codes are transposed as they are", "[gpu][fp8]") {
  PACER_NEEDS_GPU();
  const auto stream = detail::current_stream(kGpu);
  for (const auto& [rows, columns] : {std::pair{16, 16}, {128, 128}, {144, 2064}, {2064, 144}, {0, 16}}) {
    CAPTURE(rows, columns);
    const Tensor codes = torch::randint(256, {rows, columns}, at::kByte).to(kGpu);
    const Tensor transposed = at::full({columns, rows}, 7, codes.options());
    kernels::fp8_transpose_cuda(codes.const_data_ptr<uint8_t>(), rows, columns,
                                transposed.mutable_data_ptr<uint8_t>(), stream);
    REQUIRE(transposed.equal(codes.t().contiguous()));
  }
  CHECK_THROWS_WITH(kernels::fp8_transpose_cuda(nullptr, 16, 24, nullptr, stream),
                    Catch::Matchers::ContainsSubstring("16 x 24"));
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
