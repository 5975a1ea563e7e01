// Layer normalisation on the CPU: values beside LibTorch's in fp64, the order of its sums beside a
// transcript, sums, roundings and 8-bit floats to the bit.
#include "support/catch.h"

#include <cmath>
#include <limits>

#include "support/kernels/layer_norm.h"

namespace pacer::testing::kernels_layer_norm {
namespace {

using kernels::Fp8Format;
using kernels::LayerNormForward;

constexpr float kEpsilon = 1e-5f;
const std::vector<std::pair<int64_t, int64_t>> kSizes = {{1, 1},    {3, 5},    {40, 16},  {17, 768},
                                                         {2, 1032}, {5, 4096}, {3, 7000}, {2, 20000}};

// What rounding to a dtype costs, relative to the number.
double unit_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? 0x1p-24 : dtype == at::kBFloat16 ? 0x1p-8 : 0x1p-11;
}

// |found - wanted| is at most `relative` of `wanted` and `absolute`, which may be tensors.
void check_close(const Tensor& found, const Tensor& wanted, double relative, const Tensor& absolute) {
  const Tensor bound = wanted.abs() * relative + absolute;
  REQUIRE((found.to(at::kDouble) - wanted).abs().le(bound).all().item<bool>());
}

// The sum of s as it is stored, by one LibTorch operator a rounding.
Tensor sum_of(const LayerNormInput& in) {
  if (!in.branch.defined()) return in.x;
  return (in.x.to(at::kFloat) + (in.branch.to(at::kFloat) + in.branch_bias.to(at::kFloat)))
      .to(in.x.scalar_type());
}

// ---- The order of sums, as the header's text says it. ----

float transcript_of_row_sum(const std::vector<float>& terms) {
  size_t lanes = 32;
  while (lanes < 512 && lanes * 32 < terms.size()) lanes *= 2;
  std::vector<float> accumulators(8 * lanes, 0.0f);
  for (size_t j = 0; j < terms.size(); ++j) accumulators[j % (8 * lanes)] += terms[j];
  std::vector<float> level;
  for (size_t i = 0; i < accumulators.size(); i += 8) {
    const float* a = accumulators.data() + i;
    level.push_back(((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7])));
  }
  const auto fold = [](std::vector<float> list) {
    while (list.size() > 1) {
      const size_t half = list.size() / 2;
      for (size_t i = 0; i < half; ++i) list[i] += list[i + half];
      list.resize(half);
    }
    return list[0];
  };
  std::vector<float> warps;
  for (size_t i = 0; i < level.size(); i += 32)
    warps.push_back(fold({level.begin() + i, level.begin() + i + 32}));
  return fold(warps);
}

std::vector<float> row_of(const Tensor& matrix, int64_t row) {
  const Tensor floats = matrix[row].to(at::kFloat).contiguous();
  return {floats.const_data_ptr<float>(), floats.const_data_ptr<float>() + floats.numel()};
}

// A column's sum over rows of at most `most` parts, each a run of rows.
float transcript_of_column_sum(const Tensor& column, int64_t most) {
  const int64_t rows = column.numel(), in_part = std::max<int64_t>(1, (rows + most - 1) / most);
  float sums[16] = {};
  for (int64_t part = 0; part * in_part < rows; ++part) {
    float sum = 0;
    for (int64_t row = part * in_part; row < std::min(rows, (part + 1) * in_part); ++row) {
      sum += column[row].item<float>();
    }
    sums[part % 16] += sum;
  }
  for (int half = 8; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

}  // namespace

TEST_CASE("a row is normalised as LibTorch does it in fp64, within its rounding", "[kernels][layer_norm]") {
  torch::manual_seed(1);
  for (const LayerNormTypes& types : kLayerNormTypes) {
    for (const auto& [rows, columns] : kSizes) {
      for (const bool has_branch : {false, true}) {
        CAPTURE(types.stream, types.branch, types.parameter, rows, columns, has_branch);
        const LayerNormInput in = random_layer_norm(types, rows, columns, has_branch);
        const LayerNormOutput out = layer_norm_output(in, 3.0f);
        run_layer_norm(forward_of(in, out));
        const Tensor s = sum_of(in);
        if (has_branch) REQUIRE(out.sum.equal(s));
        const Tensor wide = s.to(at::kDouble), mean = wide.mean(1), variance = wide.var(1, false);
        const Tensor rstd = (variance + kEpsilon).rsqrt();
        check_close(out.mean, mean, 0, 1e-6 * wide.abs().mean(1));
        check_close(out.rstd, rstd, 1e-5, at::zeros({}));
        const Tensor weight = in.weight.to(at::kDouble), bias = in.bias.to(at::kDouble);
        const Tensor y = (wide - mean.unsqueeze(1)) * rstd.unsqueeze(1) * weight + bias;
        const Tensor magnitude = (wide.abs() + mean.abs().unsqueeze(1)) * rstd.unsqueeze(1) * weight.abs();
        check_close(out.y, y, unit_of(types.branch) * 1.001, 1e-5 * (magnitude + bias.abs()) + 1e-6);
      }
    }
  }
}

TEST_CASE("8-bit floats of a normalised row are those of its rounded values, and so is their amax",
          "[kernels][layer_norm]") {
  torch::manual_seed(2);
  for (const LayerNormTypes& types : kLayerNormTypes) {
    for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
      const LayerNormInput in = random_layer_norm(types, 6, 520, true);
      LayerNormOutput out = layer_norm_output(in, 300.0f);
      LayerNormForward work = forward_of(in, out);
      work.to.format = format;
      run_layer_norm(work);
      const Tensor y = out.y.clone();
      REQUIRE(out.codes.equal(fp8_codes(y, 300.0f, format)));
      REQUIRE(work.to.state->amax == amax_bits(y));
      REQUIRE(out.inverse.item<float>() == 1 / 300.0f);

      // Without y, and measured before by the same kernel.
      uint32_t measured = 0;
      work.y = nullptr;
      work.to.state = nullptr;
      work.to.codes = nullptr;
      work.to.measured = &measured;
      run_layer_norm(work);
      REQUIRE(measured == amax_bits(y));
      work.to.codes = memory_of<uint8_t>(out.codes);
      run_layer_norm(work);
      REQUIRE(out.codes.equal(fp8_codes(y, kernels::fp8_scale(measured, format, {}), format)));
    }
  }
}

TEST_CASE("the order of sums is the one that is written down", "[kernels][layer_norm]") {
  torch::manual_seed(3);
  for (const auto& [rows, columns] : kSizes) {
    CAPTURE(rows, columns);
    const LayerNormInput in = random_layer_norm(kLayerNormTypes[0], rows, columns, false);
    const LayerNormOutput out = layer_norm_output(in, 1.0f);
    run_layer_norm(forward_of(in, out));
    for (int64_t row = 0; row < rows; ++row) {
      const std::vector<float> s = row_of(in.x, row);
      const float mean = transcript_of_row_sum(s) / static_cast<float>(columns);
      REQUIRE(out.mean[row].item<float>() == mean);
      // A first addend is rounded alike with and without a fused multiply-add; more are for one lane to tell.
      if (columns > 256) continue;
      std::vector<float> squares;
      for (const float value : s) squares.push_back((value - mean) * (value - mean));
      const float variance = transcript_of_row_sum(squares) / static_cast<float>(columns);
      REQUIRE(out.rstd[row].item<float>() == 1.0f / std::sqrt(variance + kEpsilon));
    }
    run_layer_norm(backward_of(in, out));
    const int64_t most = columns <= 1024 ? 1024 : columns <= 2048 ? 512 : columns <= 8192 ? 256 : 128;
    for (int64_t j = 0; j < std::min<int64_t>(columns, 9); ++j) {
      REQUIRE(out.dbias[j].item<float>() == transcript_of_column_sum(in.dy.select(1, j), most));
    }
  }
  const LayerNormInput tall = random_layer_norm(kLayerNormTypes[0], 5000, 8, false);
  const LayerNormOutput out = layer_norm_output(tall, 1.0f);
  run_layer_norm(forward_of(tall, out));
  run_layer_norm(backward_of(tall, out));
  CHECK(out.partials.size(1) == 1000);
  for (int64_t j = 0; j < 8; ++j) {
    CHECK(out.dbias[j].item<float>() == transcript_of_column_sum(tall.dy.select(1, j), 1024));
  }
}

TEST_CASE("gradients of a layer normalisation are those of LibTorch in fp64", "[kernels][layer_norm]") {
  torch::manual_seed(4);
  for (const LayerNormTypes& types : kLayerNormTypes) {
    for (const auto& [rows, columns] : kSizes) {
      for (const bool has_dsum : {false, true}) {
        CAPTURE(types.stream, types.branch, types.parameter, rows, columns, has_dsum);
        LayerNormInput in = random_layer_norm(types, rows, columns, false);
        if (!has_dsum) in.dsum.reset();
        const LayerNormOutput out = layer_norm_output(in, 1.0f);
        run_layer_norm(forward_of(in, out));
        run_layer_norm(backward_of(in, out));

        const auto leaf = [](const Tensor& tensor) {
          return tensor.to(at::kDouble).detach().clone().requires_grad_();
        };
        const Tensor s = leaf(in.x), weight = leaf(in.weight), bias = leaf(in.bias),
                     dy = in.dy.to(at::kDouble);
        at::layer_norm(s, {columns}, weight, bias, kEpsilon).backward(dy);
        const Tensor dx = has_dsum ? s.grad() + in.dsum.to(at::kDouble) : s.grad();
        const Tensor rstd = out.rstd.to(at::kDouble).unsqueeze(1);
        const Tensor normalized = (s.detach() - out.mean.to(at::kDouble).unsqueeze(1)) * rstd;
        const Tensor row_size = (dy * weight.detach()).abs().amax(1, true) * rstd * (1 + normalized.abs());
        check_close(out.dx, dx, unit_of(types.stream) * 1.001,
                    1e-5 * (row_size * normalized.abs().amax() + 1));
        check_close(out.dweight, weight.grad(), 1e-6,
                    1e-5 * (dy * (normalized.abs() + out.mean.abs().unsqueeze(1) * rstd)).abs().sum(0));
        check_close(out.dbias, bias.grad(), 1e-6, 1e-6 * dy.abs().sum(0));

        // In place, and without the gradients of parameters.
        if (!has_dsum) continue;
        kernels::LayerNormBackward work = backward_of(in, out);
        const Tensor into = in.dsum.clone();
        work.dsum = work.dx = into.data_ptr();
        work.partials = work.dweight = work.dbias = nullptr;
        run_layer_norm(work);
        REQUIRE(into.equal(out.dx));
      }
    }
  }
}

TEST_CASE("by the root of the mean square a row and its gradients are LibTorch's in fp64",
          "[kernels][layer_norm][rms_norm]") {
  torch::manual_seed(7);
  for (const LayerNormTypes& types : kLayerNormTypes) {
    for (const auto& [rows, columns] : kSizes) {
      for (const bool has_branch : {false, true}) {
        CAPTURE(types.stream, types.branch, types.parameter, rows, columns, has_branch);
        LayerNormInput in = random_layer_norm(types, rows, columns, has_branch, Normalization::rms);
        if (!has_branch) in.dsum.reset();
        const LayerNormOutput out = layer_norm_output(in, 30.0f);
        run_layer_norm(forward_of(in, out));
        run_layer_norm(backward_of(in, out));

        const Tensor stored = sum_of(in);
        if (has_branch) REQUIRE(out.sum.equal(stored));
        const auto leaf = [](const Tensor& tensor) {
          return tensor.to(at::kDouble).detach().clone().requires_grad_();
        };
        const Tensor s = leaf(stored), weight = leaf(in.weight), dy = in.dy.to(at::kDouble);
        const Tensor y = at::rms_norm(s, {columns}, weight, kEpsilon);
        y.backward(dy);
        check_close(out.y, y.detach(), unit_of(types.branch) * 1.001, 1e-5 * y.detach().abs() + 1e-6);
        REQUIRE(out.codes.equal(fp8_codes(out.y, 30.0f, Fp8Format::e4m3)));
        const Tensor mean_square = s.detach().square().mean(1, true), rstd = (mean_square + kEpsilon).rsqrt();
        check_close(out.rstd, rstd.squeeze(1), 1e-5, at::zeros({}));
        const Tensor dx = has_branch ? s.grad() + in.dsum.to(at::kDouble) : s.grad();
        const Tensor normalized = s.detach() * rstd;
        const Tensor row_size = (dy * weight.detach()).abs().amax(1, true) * rstd * (1 + normalized.abs());
        check_close(out.dx, dx, unit_of(types.stream) * 1.001,
                    1e-5 * (row_size * normalized.abs().amax() + 1));
        check_close(out.dweight, weight.grad(), 1e-6, 1e-5 * (dy * normalized).abs().sum(0));
      }
    }
  }
}

TEST_CASE("before a layer normalisation a dropped element is the residual alone", "[kernels][layer_norm]") {
  torch::manual_seed(5);
  for (const LayerNormTypes& types : kLayerNormTypes) {
    LayerNormInput in = random_layer_norm(types, 6, 132, true);
    in.dropout = kernels::dropout_of(0.4, 11);
    const LayerNormOutput out = layer_norm_output(in, 1.0f);
    run_layer_norm(forward_of(in, out));
    const Tensor branch = in.branch.to(at::kFloat) + in.branch_bias.to(at::kFloat);
    const Tensor kept = (in.x.to(at::kFloat) + branch * in.dropout.scale).to(types.stream);
    Tensor mask = at::empty({6, 132}, at::kBool);
    for (int64_t i = 0; i < mask.numel(); ++i) {
      mask.view(-1)[i] = kernels::dropout_draws(in.dropout, i / 4).word[i % 4] >= in.dropout.threshold;
    }
    REQUIRE(out.sum.equal(at::where(mask, kept, in.x)));
    REQUIRE(mask.any().item<bool>() != mask.all().item<bool>());

    // Only the sum, in place.
    LayerNormForward only_sum = forward_of(in, LayerNormOutput{});
    const Tensor into = in.x.clone();
    only_sum.x = only_sum.sum = into.data_ptr();
    only_sum.weight = nullptr;
    run_layer_norm(only_sum);
    REQUIRE(into.equal(out.sum));
    only_sum.x = nullptr;
    run_layer_norm(only_sum);
    REQUIRE(into.equal(at::where(mask, (branch * in.dropout.scale).to(types.stream), at::zeros_like(into))));
  }
}

TEST_CASE("a measurement that nobody needs is left out, and NaN is passed on", "[kernels][layer_norm]") {
  torch::manual_seed(6);
  LayerNormInput in = random_layer_norm(kLayerNormTypes[3], 4, 64, false);
  LayerNormOutput out;
  out.measured = at::zeros({1}, at::kInt);
  LayerNormForward work = forward_of(in, out);
  kernels::Fp8Scale state;
  work.to.state = &state;
  run_layer_norm(work);
  const int32_t amax = out.measured.item<int32_t>();
  CHECK(amax > 0);
  out.measured.zero_();
  state.count = 1;
  work.x = reinterpret_cast<const void*>(16);  // not even read
  run_layer_norm(work);
  CHECK(out.measured.item<int32_t>() == 0);

  in.bias.reset();
  in.x[2][5] = std::numeric_limits<float>::infinity();
  out = layer_norm_output(in, 1.0f);
  run_layer_norm(forward_of(in, out));
  CHECK(out.y[2].isnan().all().item<bool>());
  CHECK(out.y.isnan().sum().item<int64_t>() == 64);
  CHECK(out.inverse.isnan().item<bool>());
  const Tensor weight = in.weight.to(at::kDouble), s = in.x[0].to(at::kDouble);
  const Tensor y = (s - s.mean()) * (s.var(0, false) + kEpsilon).rsqrt() * weight;
  check_close(out.y[0], y, unit_of(at::kBFloat16) * 1.001, at::full({}, 1e-5));
}

TEST_CASE("a layer normalisation refuses what it cannot do", "[kernels][layer_norm]") {
  using Catch::Matchers::ContainsSubstring;
  const LayerNormInput in = random_layer_norm(kLayerNormTypes[3], 2, 6, true);
  const LayerNormOutput out = layer_norm_output(in, 1.0f);
  const LayerNormForward good = forward_of(in, out);
  const auto refuses = [&](const auto& spoil, const std::string& part) {
    LayerNormForward work = good;
    spoil(work);
    CHECK_THROWS_WITH(kernels::layer_norm_cpu(work, 0, 2), ContainsSubstring(part));
  };
  CHECK_NOTHROW(kernels::layer_norm_cpu(good, 0, 2));
  const auto by_rms = [](auto& work) { work.normalization = Normalization::rms; };
  refuses(by_rms, "neither a bias nor a mean");
  refuses([](auto& work) { work.branch_type = kernels::ElementType::f16; }, "branch of the same type");
  refuses([](auto& work) { work.branch_type = kernels::ElementType::f32; }, "branch of the same type");
  refuses([](auto& work) { work.parameter_type = kernels::ElementType::f16; }, "parameters of 32 bits");
  refuses([](auto& work) { work.dropout = kernels::dropout_of(0.5, 1); }, "multiple of 4, not 6");
  refuses([](auto& work) { work.to.transposed = work.to.codes; }, "transposed");
  refuses([](auto& work) { work.branch = nullptr; }, "without a branch");
  refuses([](auto& work) { work.x = work.branch = nullptr; }, "needs what it normalises");
  refuses([](auto& work) { work.weight = nullptr; }, "without a weight");
  const LayerNormInput no_rows = random_layer_norm(kLayerNormTypes[3], 0, 16, false);
  const LayerNormOutput of_none = layer_norm_output(no_rows, 1.0f);
  run_layer_norm(forward_of(no_rows, of_none));
  run_layer_norm(backward_of(no_rows, of_none));
  CHECK(of_none.dweight.equal(at::zeros({16})));
  kernels::LayerNormBackward backward = backward_of(in, out);
  backward.partials = nullptr;
  CHECK_THROWS_WITH(kernels::layer_norm_backward_cpu(backward, 0, 1), ContainsSubstring("partial sums"));
  backward = backward_of(in, out);
  by_rms(backward);
  CHECK_THROWS_WITH(kernels::layer_norm_backward_cpu(backward, 0, 1), ContainsSubstring("no gradient of it"));
}

}  // namespace pacer::testing::kernels_layer_norm
