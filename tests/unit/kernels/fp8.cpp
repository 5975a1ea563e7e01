// 8-bit floats on the CPU: every number of 16 bits beside LibTorch's conversion, transposes, amax, and scales
// beside a transcript of what others do.
#include "support/catch.h"

#include <cmath>
#include <deque>
#include <limits>

#include "support/kernels/fp8_reference.h"
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
  float inverse = 0;
};

// In two parts.
Codes cast(const Tensor& x, const kernels::Fp8Target& how, bool transposes) {
  Codes codes{at::empty(x.sizes(), at::kByte), {}};
  Fp8Cast work{element_type_of(x.scalar_type()), x.const_data_ptr(), x.size(0), x.size(1), how};
  work.to.codes = codes.plain.mutable_data_ptr<uint8_t>();
  if (transposes) {
    codes.transposed = at::empty({x.size(1), x.size(0)}, at::kByte);
    work.to.transposed = codes.transposed.mutable_data_ptr<uint8_t>();
  }
  work.to.inverse = &codes.inverse;
  kernels::fp8_cast_cpu(work, 0, x.size(0) / 2);
  kernels::fp8_cast_cpu(work, x.size(0) / 2, x.size(0));
  return codes;
}
Codes cast(const Tensor& x, float scale, Fp8Format format, bool transposes) {
  Fp8Scale state = fp8_scale_of(scale);
  kernels::Fp8Target how;
  how.format = format;
  how.state = &state;
  Codes codes = cast(x, how, transposes);
  codes.amax = state.amax;
  return codes;
}

// The amax that a cast without codes measures.
uint32_t measured(const Tensor& x, Fp8Scale* state = nullptr) {
  uint32_t amax = 0;
  Fp8Cast work{element_type_of(x.scalar_type()), x.const_data_ptr(), x.size(0), x.size(1), {}};
  work.to.state = state;
  work.to.measured = &amax;
  kernels::fp8_cast_cpu(work, 0, x.size(0));
  return amax;
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

TEST_CASE("a tensor without a history is scaled by its own amax, and 1 / scale is noted", "[kernels][fp8]") {
  torch::manual_seed(3);
  for (const Fp8Format format : kFormats) {
    const Tensor x = torch::randn({8, 24}) * 1e-3;
    uint32_t amax = measured(x);
    REQUIRE(amax == amax_bits(x));
    const float own = kernels::fp8_scale(amax, format, {});
    kernels::Fp8Target how;
    how.format = format;
    how.measured = &amax;
    Fp8Scale fresh;
    for (Fp8Scale* state : {static_cast<Fp8Scale*>(nullptr), &fresh}) {
      how.state = state;
      const Codes codes = cast(x, how, false);
      CHECK(codes.plain.equal(fp8_codes(x, own, format)));
      CHECK(codes.inverse == 1 / own);
    }
    CHECK(fresh.amax == amax);
    Fp8Scale known = fp8_scale_of(4);
    how.state = &known;
    how.records = false;
    const Codes codes = cast(x, how, false);
    CHECK(codes.plain.equal(fp8_codes(x, 4, format)));
    CHECK(codes.inverse == 0.25f);
    CHECK(known.amax == 0);
    CHECK(measured(x, &known) == 0);  // nobody needs it
    CHECK(measured(x, &fresh) == amax);
  }
}

TEST_CASE("1 / scale is NaN for a tensor that is not finite, and saturation hides nothing",
          "[kernels][fp8]") {
  for (const float value : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    for (const int64_t place : {0, 5}) {
      Tensor x = torch::ones({6, 1});
      x[place] = value;
      CHECK(std::isnan(cast(x, 1, Fp8Format::e4m3, false).inverse));
      uint32_t amax = measured(x);
      kernels::Fp8Target how;
      how.measured = &amax;
      CHECK(std::isnan(cast(x, how, false).inverse));
    }
  }
  const Tensor zeros = torch::zeros({2, 2});
  uint32_t amax = measured(zeros);
  kernels::Fp8Target how;
  how.measured = &amax;
  CHECK(cast(zeros, how, false).inverse == 0x1p-120f);
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

TEST_CASE("codes are transposed as they are", "[kernels][fp8]") {
  for (const auto& [rows, columns] : {std::pair{64, 400}, {1, 1}, {3, 5}, {200, 130}, {0, 16}}) {
    const Tensor codes = torch::randint(256, {rows, columns}, at::kByte);
    const Tensor transposed = at::empty({columns, rows}, at::kByte);
    for (const auto& [begin, end] : {std::pair{0, rows / 3}, {rows / 3, rows}}) {
      kernels::fp8_transpose_cpu(codes.const_data_ptr<uint8_t>(), rows, columns,
                                 transposed.mutable_data_ptr<uint8_t>(), begin, end);
    }
    REQUIRE(transposed.equal(codes.t().contiguous()));
  }
}

TEST_CASE("a cast with dropout casts what dropout leaves, in fp32", "[kernels][fp8]") {
  torch::manual_seed(4);
  for (const at::ScalarType dtype : kDtypes) {
    const Tensor x = torch::randn({130, 276}).to(dtype);
    const kernels::Dropout dropout = kernels::dropout_of(0.3, 11);
    const Tensor left = fp8_dropped(x, dropout);
    REQUIRE(left.eq(0).sum().item<int64_t>() > 10000);
    for (const bool measures : {false, true}) {
      Fp8Cast work{element_type_of(dtype), x.const_data_ptr(), x.size(0), x.size(1), {}};
      work.dropout = dropout;
      uint32_t amax = 0;
      float inverse = 0;
      Fp8Scale state = fp8_scale_of(3);
      const Tensor codes = at::empty(x.sizes(), at::kByte), transposed = at::empty({276, 130}, at::kByte);
      if (measures) {
        work.to.measured = &amax;
        kernels::fp8_cast_cpu(work, 0, 130);
        REQUIRE(amax == amax_bits(left));
        continue;
      }
      work.to.state = &state;
      work.to.inverse = &inverse;
      work.to.codes = codes.mutable_data_ptr<uint8_t>();
      work.to.transposed = transposed.mutable_data_ptr<uint8_t>();
      kernels::fp8_cast_cpu(work, 0, 128);
      kernels::fp8_cast_cpu(work, 128, 130);
      REQUIRE(codes.equal(fp8_codes(left, 3, Fp8Format::e4m3)));
      REQUIRE(transposed.equal(codes.t().contiguous()));
      REQUIRE(state.amax == amax_bits(left));
    }
  }
  const Tensor odd = torch::randn({4, 6});
  Fp8Cast work{kernels::ElementType::f32, odd.const_data_ptr(), 4, 6, {}};
  work.dropout = kernels::dropout_of(0.3, 11);
  CHECK_THROWS_WITH(kernels::fp8_cast_cpu(work, 0, 4), Catch::Matchers::ContainsSubstring("multiple of 4"));
}

TEST_CASE("matrices side by side are cast as one", "[kernels][fp8]") {
  torch::manual_seed(8);
  for (const at::ScalarType dtype : kDtypes) {
    for (const auto& [rows, width] : {std::pair{1, 1}, {130, 7}, {32, 400}}) {
      CAPTURE(dtype, rows, width);
      const Tensor x[] = {torch::randn({rows, width}).to(dtype), torch::randn({rows, width}).to(dtype) * 3,
                          torch::randn({rows, width}).to(dtype)};
      const Tensor whole = at::cat(at::TensorList(x), 1);
      const auto cast_of = [&](const Tensor& first, bool has_others, Tensor& sums) {
        uint32_t amax = 0;
        float inverse = 0;
        const Tensor codes = at::empty({rows, 3 * width}, at::kByte),
                     across = at::empty({3 * width, rows}, at::kByte);
        const Tensor partials = at::empty({kernels::fp8_parts(rows), 3 * width});
        sums = at::empty({3 * width});
        Fp8Cast work{element_type_of(dtype), first.const_data_ptr(), rows, 3 * width, {}};
        for (int i = 0; i < 2 && has_others; ++i) work.beside[i] = x[i + 1].const_data_ptr();
        work.to.measured = &amax;
        work.to.inverse = &inverse;
        kernels::fp8_cast_cpu(work, 0, rows);
        REQUIRE(amax == amax_bits(whole));
        work.to.codes = codes.mutable_data_ptr<uint8_t>();
        work.to.transposed = across.mutable_data_ptr<uint8_t>();
        work.partials = partials.mutable_data_ptr<float>();
        work.column_sums = sums.mutable_data_ptr<float>();
        kernels::fp8_cast_cpu(work, 0, rows);
        REQUIRE(across.t().equal(codes));
        return codes;
      };
      Tensor wanted_sums, sums;
      REQUIRE(cast_of(x[0], true, sums).equal(cast_of(whole, false, wanted_sums)));
      REQUIRE(sums.equal(wanted_sums));
    }
  }
  const float x[8] = {};
  Fp8Cast work{kernels::ElementType::f32, x, 1, 8, {}};
  work.beside[0] = work.beside[1] = x;
  CHECK_THROWS_WITH(kernels::fp8_cast_cpu(work, 0, 1),
                    Catch::Matchers::ContainsSubstring("not of 8 together"));
  work.columns = 12;
  work.dropout = kernels::dropout_of(0.5, 1);
  CHECK_THROWS_WITH(kernels::fp8_cast_cpu(work, 0, 1), Catch::Matchers::ContainsSubstring("drops nothing"));
}

TEST_CASE("columns are summed in one order, whichever way they are cast", "[kernels][fp8]") {
  torch::manual_seed(5);
  for (const at::ScalarType dtype : kDtypes) {
    for (const auto& [rows, columns] :
         {std::pair{1, 3}, {128, 16}, {130, 300}, {1500, 20}, {2311, 8}, {0, 5}}) {
      CAPTURE(dtype, rows, columns);
      const Tensor x = torch::randn({rows, columns}).to(dtype);
      const Tensor wanted = fp8_column_sums(x);
      for (const int way : {0, 1, 2}) {       // alone, with codes, and while the tensor is only measured
        if (way == 1 && rows == 0) continue;  // no memory, no codes
        Fp8Cast work{element_type_of(dtype), x.const_data_ptr(), rows, columns, {}};
        const Tensor partials = at::full({kernels::fp8_parts(rows), columns}, 7.0f);
        const Tensor sums = at::full({columns}, 7.0f);
        const Tensor codes = at::empty({rows, columns}, at::kByte);
        uint32_t amax = kernels::bits_of(4.0f);
        float inverse = 0;
        work.partials = partials.mutable_data_ptr<float>();
        work.column_sums = sums.mutable_data_ptr<float>();
        if (way > 0) work.to.measured = &amax;
        if (way == 1) work.to.codes = codes.mutable_data_ptr<uint8_t>();
        work.to.inverse = &inverse;
        const int64_t middle = rows / 256 * 128;
        kernels::fp8_cast_cpu(work, 0, middle);
        kernels::fp8_cast_cpu(work, middle, rows);
        REQUIRE(sums.equal(way == 2 ? at::full({columns}, 7.0f) : wanted));
      }
      const Tensor exact = x.to(at::kDouble).sum(0), scale = x.to(at::kDouble).abs().sum(0) + 1e-30;
      REQUIRE((((wanted - exact).abs() / scale).max().item<double>() < 40 * 0x1p-24));
    }
  }
  const Tensor nan = at::full({4, 1}, std::nanf(""));
  CHECK(fp8_column_sums(nan).isnan().all().item<bool>());
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
