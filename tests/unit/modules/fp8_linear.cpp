// pacer::modules::Linear in 8-bit floats beside products of the same codes in fp64.
#include "support/catch.h"
#include "support/heard_warnings.h"

#include <cmath>
#include <limits>

#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <pacer/modules/fp8_scaling.h>
#include <pacer/modules/linear.h>

#include "support/kernels/fp8_reference.h"

namespace pacer::testing::fp8_linear {
namespace {

using kernels::Fp8Format;

constexpr double kBf16 = 1.0 / 256;  // the largest relative error of one rounding to bf16

Fp8Options current() { return Fp8Options().recipe(Fp8Recipe::current); }

// The values that codes of `x` with its own scale stand for, fp64.
Tensor dequantised(const Tensor& x, Fp8Format format = Fp8Format::e4m3) {
  const float scale = kernels::fp8_scale(amax_bits(x), format, {});
  const at::ScalarType type = format == Fp8Format::e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
  return fp8_codes(x, scale, format).view(type).to(at::kFloat).to(at::kDouble) / scale;
}

double relative_error(const Tensor& found, const Tensor& wanted) {
  return ((found.to(at::kDouble) - wanted.to(at::kDouble)).norm() / wanted.to(at::kDouble).norm())
      .item<double>();
}

// Each element within `roundings` of bf16 and what fp32 additions of its terms leave.
void check_close(const Tensor& found, const Tensor& wanted, const Tensor& of_magnitudes,
                 double roundings = 1) {
  REQUIRE(found.sizes() == wanted.sizes());
  const Tensor bound = roundings * kBf16 * wanted.abs() + 1e-5 * of_magnitudes + 1e-30;
  CHECK((found.to(at::kDouble) - wanted).abs().le(bound).all().item<bool>());
}

struct Setting {
  at::ScalarType x, weight;
  bool has_bias;
  std::vector<int64_t> sizes;  // of x but for the last
};

}  // namespace

TEST_CASE("pacer::modules::Linear is torch::nn::Linear where no scope says otherwise", "[fp8][modules]") {
  for (const bool has_bias : {true, false}) {
    const auto options = torch::nn::LinearOptions(7, 5).bias(has_bias);
    torch::manual_seed(4);
    torch::nn::Linear theirs(options);
    torch::manual_seed(4);
    modules::Linear ours(options);
    REQUIRE(ours->named_parameters().keys() == theirs->named_parameters().keys());
    for (const auto& item : theirs->named_parameters()) {
      REQUIRE(ours->named_parameters()[item.key()].equal(item.value()));
    }
    const Tensor x = torch::randn({3, 2, 7});
    CHECK(ours(x).equal(theirs(x)));
    const auto clone = std::dynamic_pointer_cast<modules::LinearImpl>(ours->clone());
    CHECK(clone->forward(x).equal(theirs(x)));
    CHECK_FALSE(clone->weight.is_same(ours->weight));
  }
  std::string said;
  {
    HeardWarnings ear(said);
    const c10::WarningUtils::WarningHandlerGuard guard(&ear);
    const modules::Linear without_bias(torch::nn::LinearOptions(3, 4).bias(false));
    CHECK_FALSE(without_bias->bias.defined());
  }
  CHECK(said == "");
  CHECK(modules::Linear(0, 3)(torch::zeros({2, 0})).equal(torch::zeros({2, 3})));
  CHECK(torch::nn::Sequential(modules::Linear(4, 4), modules::Linear(4, 2))
            ->forward(torch::zeros({1, 4}))
            .size(1) == 2);
}

TEST_CASE("results and gradients are products of codes, added in fp32", "[fp8][modules]") {
  const std::vector<Setting> settings = {{at::kBFloat16, at::kFloat, true, {32}},
                                         {at::kFloat, at::kFloat, true, {2, 16}},
                                         {at::kBFloat16, at::kBFloat16, false, {16}},
                                         {at::kHalf, at::kHalf, true, {4, 2, 4}}};
  for (const Setting& setting : settings) {
    for (const at::ScalarType gradients : {at::kFloat8_e5m2, at::kFloat8_e4m3fn}) {
      CAPTURE(setting.x, setting.weight, setting.has_bias, gradients);
      torch::manual_seed(5);
      modules::Linear layer(torch::nn::LinearOptions(48, 64).bias(setting.has_bias));
      layer->to(setting.weight);
      std::vector<int64_t> sizes = setting.sizes;
      sizes.push_back(48);
      const Tensor x = torch::randn(sizes).to(setting.x).requires_grad_();
      const auto scaling = std::make_shared<Fp8Scaling>(*layer, current().gradients(gradients));
      Tensor y;
      {
        const Fp8Scope scope(scaling);
        y = layer(x);
      }
      REQUIRE(y.scalar_type() == (setting.x == at::kFloat ? at::kBFloat16 : setting.x));
      REQUIRE(y.sizes().slice(0, setting.sizes.size()) == at::IntArrayRef(setting.sizes));
      const Tensor dy = torch::randn_like(y);
      y.backward(dy);

      const Tensor x8 = dequantised(x.detach()).view({-1, 48}), w8 = dequantised(layer->weight.detach());
      const Fp8Format format = gradients == at::kFloat8_e5m2 ? Fp8Format::e5m2 : Fp8Format::e4m3;
      const Tensor dy8 = dequantised(dy, format).view({-1, 64});
      Tensor wanted = x8.mm(w8.t());
      if (setting.has_bias) wanted = wanted + layer->bias.detach().to(at::kDouble);
      // The bias is rounded, too.
      check_close(y.detach().view({-1, 64}), wanted, x8.abs().mm(w8.abs().t()) + 400.0, 1);
      check_close(x.grad().view({-1, 48}), dy8.mm(w8), dy8.abs().mm(w8.abs()));
      check_close(layer->weight.grad(), dy8.t().mm(x8), dy8.abs().t().mm(x8.abs()));
      CHECK(x.grad().scalar_type() == setting.x);
      CHECK(layer->weight.grad().scalar_type() == setting.weight);
      if (setting.has_bias) {
        const Tensor sums = dy.to(at::kDouble).view({-1, 64}).sum(0);
        check_close(layer->bias.grad(), sums, dy.to(at::kDouble).abs().view({-1, 64}).sum(0));
      }
      CHECK(scaling->other_calls() == 0);
    }
  }
}

TEST_CASE("errors of a layer are those of its formats", "[fp8][modules]") {
  torch::manual_seed(6);
  modules::Linear layer(torch::nn::LinearOptions(512, 256).bias(false));
  torch::nn::init::normal_(layer->weight);
  const Tensor x = torch::randn({512, 512}).requires_grad_();
  const auto scaling = std::make_shared<Fp8Scaling>(*layer);
  Tensor y;
  {
    const Fp8Scope scope(scaling);
    y = layer(x);
  }
  const Tensor dy = torch::randn_like(y);
  y.backward(dy);
  const Tensor wx = x.detach().to(at::kDouble), ww = layer->weight.detach().to(at::kDouble),
               wdy = dy.to(at::kDouble);
  // Predicted for Gaussian numbers: .037, .059, .059.
  CHECK(relative_error(y, wx.mm(ww.t())) <= 0.040);
  CHECK(relative_error(x.grad(), wdy.mm(ww)) <= 0.063);
  CHECK(relative_error(layer->weight.grad(), wdy.t().mm(wx)) <= 0.063);
  CHECK(relative_error(y, wx.mm(ww.t())) >= 0.030);  // it did compute in 8 bits
}

TEST_CASE("what is not finite shows in all products", "[fp8][modules]") {
  for (const Fp8Options& options : {Fp8Options(), current()}) {
    modules::Linear layer(16, 16);
    const auto scaling = std::make_shared<Fp8Scaling>(*layer, options);
    for (const float value : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
      const Fp8Scope scope(scaling);
      Tensor x = torch::ones({16, 16});
      x[2][2] = value;
      CHECK(layer(x).isnan().all().item<bool>());
      const Tensor fine = torch::ones({16, 16}).requires_grad_();
      const Tensor y = layer(fine);
      Tensor dy = torch::ones_like(y);
      dy[1][1] = value;
      y.backward(dy);
      CHECK(fine.grad().isnan().all().item<bool>());
      CHECK(layer->weight.grad().isnan().all().item<bool>());
      layer->zero_grad();
    }
    const Fp8Scope scope(scaling);
    CHECK(layer(torch::zeros({16, 16})).equal(layer->bias.to(at::kBFloat16).expand({16, 16})));
  }
}

TEST_CASE("calls whose sizes are no multiples of 16 run in 16 bits, and are counted", "[fp8][modules]") {
  torch::nn::Sequential model(modules::Linear(16, 16), modules::Linear(16, 24));
  const auto scaling = std::make_shared<Fp8Scaling>(*model);
  const Tensor x = torch::randn({5, 16});
  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  copy->to(at::kBFloat16);
  const Tensor wanted = copy->forward(x.to(at::kBFloat16));
  const Fp8Scope scope(scaling);
  CHECK(model->forward(x).equal(wanted));
  CHECK(scaling->other_calls() == 2);
  model->forward(torch::randn({16, 16}));
  CHECK(scaling->other_calls() == 3);
  CHECK(model->forward(torch::randn({0, 16})).numel() == 0);
  CHECK_THROWS(model->forward(torch::randn({16, 15})));
}

TEST_CASE("frozen and partly frozen layers, views and passes without gradients", "[fp8][modules]") {
  torch::manual_seed(8);
  modules::Linear layer(32, 16);
  const auto scaling = std::make_shared<Fp8Scaling>(*layer, current());
  const Fp8Scope scope(scaling);
  const Tensor wide = torch::randn({32, 48}), x = wide.t().narrow(0, 0, 48).requires_grad_();
  const Tensor y = layer(x);
  CHECK(y.equal(layer(x.detach().contiguous())));
  y.to(at::kFloat).square().sum().backward();
  const Tensor dx = x.grad().clone(), db = layer->bias.grad().clone();
  x.mutable_grad() = Tensor();
  layer->zero_grad();
  layer->weight.set_requires_grad(false);
  layer(x).to(at::kFloat).square().sum().backward();
  CHECK(x.grad().equal(dx));
  CHECK(layer->bias.grad().equal(db));
  CHECK_FALSE(layer->weight.grad().defined());
  layer->weight.set_requires_grad(true);
  layer->zero_grad();
  layer(x.detach()).to(at::kFloat).square().sum().backward();
  CHECK(layer->weight.grad().defined());
  const at::NoGradGuard no_grad;
  CHECK(layer(x).equal(y));
}

}  // namespace pacer::testing::fp8_linear
