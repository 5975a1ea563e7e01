// 8-bit floats on the CPU: every number of 16 bits beside LibTorch's conversion, transposes, amax, and scales
// beside a transcript of what others do.
#include "support/catch.h"

#include <cmath>
#include <deque>
#include <limits>

#include "support/fp8_reference.h"
#include "support/samples.h"

namespace pacer::testing::kernels_fp8 {
namespace {

using kernels::Fp8Cast;
using kernels::Fp8Format;
using kernels::Fp8Rule;
using kernels::Fp8Scale;

constexpr Fp8Format kFormats[] = {Fp8Format::e4m3, Fp8Format::e5m2};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

struct Codes {
  Tensor plain, transposed;
  uint32_t amax = 0;
};

// In two parts, as threads would.
Codes cast(const Tensor& x, float scale, Fp8Format format, bool transposes) {
  Codes codes{at::empty(x.sizes(), at::kByte), {}};
  Fp8Cast work{fp8_source(x.scalar_type()), x.const_data_ptr(), x.size(0), x.size(1), format, &scale};
  work.codes = codes.plain.mutable_data_ptr<uint8_t>();
  if (transposes) {
    codes.transposed = at::empty({x.size(1), x.size(0)}, at::kByte);
    work.transposed = codes.transposed.mutable_data_ptr<uint8_t>();
  }
  work.amax = &codes.amax;
  kernels::fp8_cast_cpu(work, 0, x.size(0) / 2);
  kernels::fp8_cast_cpu(work, x.size(0) / 2, x.size(0));
  return codes;
}

}  // namespace

TEST_CASE("every number becomes the 8-bit float that LibTorch makes of it, saturated", "[kernels][fp8]") {
  for (const at::ScalarType dtype : kDtypes) {
    const Tensor x = dtype == at::kFloat ? telling_floats() : all_numbers(dtype);
    for (const Fp8Format format : kFormats) {
      for (const float scale : fp8_scales()) {
        CAPTURE(dtype, format == Fp8Format::e4m3, scale);
        REQUIRE(
            cast(x.view({2, -1}), scale, format, false).plain.flatten().equal(fp8_codes(x, scale, format)));
      }
    }
  }
}

TEST_CASE("transposed codes are the codes of the transpose, and amax that of the whole matrix",
          "[kernels][fp8]") {
  torch::manual_seed(1);
  for (const at::ScalarType dtype : kDtypes) {
    for (const auto& [rows, columns] : {std::pair{64, 400}, {16, 16}, {48, 130}, {2, 1}, {0, 16}}) {
      const Tensor x = torch::randn({rows, columns}).to(dtype);
      const Codes codes = cast(x, 3.0f, Fp8Format::e5m2, true);
      REQUIRE(codes.plain.equal(fp8_codes(x, 3.0f, Fp8Format::e5m2)));
      REQUIRE(codes.transposed.equal(codes.plain.t().contiguous()));
      REQUIRE(codes.amax == amax_bits(x));
    }
  }
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  const auto amax = [](const std::vector<float>& values) {
    return cast(torch::tensor(values).view({-1, 1}), 1, Fp8Format::e4m3, false).amax;
  };
  CHECK(amax({1, -3, 2}) == kernels::bits_of(3));
  CHECK(amax({1, -infinity}) == 0x7F800000u);
  CHECK(amax({-nan, infinity, 1}) == 0x7FC00000u);
  CHECK(amax({0, -0.0f}) == 0);
}

// Others keep the magnitudes of the last steps, that of the coming update first, and leave a scale alone that
// would not be finite.
struct Transcript {
  std::deque<float> history;
  float scale = 1;
  void update(float amax, size_t steps, bool newest_only, float largest) {
    history.push_front(amax);
    if (history.size() > steps) history.pop_back();
    const float decides = newest_only ? amax : *std::max_element(history.begin(), history.end());
    scale = std::min(largest / decides, 0x1p120f);
  }
};

TEST_CASE("scales follow the magnitudes of the last steps, but no zero, infinity or NaN", "[kernels][fp8]") {
  Samples samples(5);
  for (const Fp8Format format : kFormats) {
    for (const bool newest_only : {false, true}) {
      for (const uint32_t steps : {1u, 2u, 16u}) {
        Fp8Rule rule;
        rule.history = steps;
        rule.newest_only = newest_only;
        rule.margin = 0;
        rule.power_of_two = false;
        Fp8Scale tensor;
        tensor.format = format;
        std::vector<uint32_t> history(steps);
        Transcript transcript;
        for (int t = 0; t < 500; ++t) {
          const double kind = samples.uniform();
          const float amax = kind < 0.05   ? 0.0f
                             : kind < 0.10 ? std::numeric_limits<float>::infinity()
                             : kind < 0.15 ? std::nanf("")
                             : kind < 0.25 ? 1e-42f
                                           : std::ldexp(1.0f, static_cast<int>(samples.uniform() * 60) - 30) *
                                                 static_cast<float>(1 + samples.uniform());
          tensor.amax = kernels::magnitude_bits(amax);
          kernels::fp8_update(tensor, history.data(), rule);
          if (amax > 0 && std::isfinite(amax)) {
            transcript.update(amax, steps, newest_only, kernels::fp8_largest(format));
          }
          REQUIRE(tensor.scale == transcript.scale);
          REQUIRE(tensor.inverse == 1.0f / transcript.scale);
          REQUIRE(tensor.amax == 0);
        }
      }
    }
  }
}

TEST_CASE("a scale leaves the margin, and as a power of two has an exact inverse", "[kernels][fp8]") {
  for (const Fp8Format format : kFormats) {
    for (const int margin : {0, 1, 3}) {
      for (const float amax : {1.0f, 0.7f, 447.0f, 3e-39f, 1e-5f, 3e38f}) {
        Fp8Rule rule;
        rule.margin = margin;
        const float scale = kernels::fp8_scale(kernels::bits_of(amax), format, rule);
        const double reached = static_cast<double>(scale) * amax;
        const double bound = std::ldexp(kernels::fp8_largest(format), -margin);
        CAPTURE(margin, amax, scale);
        CHECK(reached <= bound);
        CHECK((reached > bound / 2 || scale == 0x1p120f));
        int exponent;
        CHECK(std::frexp(scale, &exponent) == 0.5f);
      }
    }
  }
}

}  // namespace pacer::testing::kernels_fp8
