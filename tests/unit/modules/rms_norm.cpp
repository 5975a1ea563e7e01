// RmsNorm beside LibTorch's function in fp64, and what fused layers have of it.
#include "support/catch.h"

#include <string>
#include <vector>

#include "support/kernels/fused_reference.h"
#include "support/modules/autocast.h"

namespace pacer::testing::fused_layers {
namespace {

using Catch::Matchers::ContainsSubstring;

std::vector<std::string> names_of(const torch::nn::Module& module) {
  return module.named_parameters().keys();
}

Pass exact_pass(modules::RmsNorm& norm, const Tensor& x, const Tensor& dy) {
  return pass(
      *norm, [&](const Tensor& in) { return norm_of(norm, in.to(at::kDouble)); }, x, dy);
}

}  // namespace

TEST_CASE("an RmsNorm is LibTorch's function, forward and backward", "[modules][rms_norm]") {
  modules::RmsNorm norm(modules::RmsNormOptions(32).eps(0.3));
  CHECK(norm->weight.equal(torch::ones({32})));
  randomize(*norm);
  const Tensor x = batch() * 2 + 0.5, dy = torch::randn_like(x);
  const Pass exact = exact_pass(norm, x, dy);
  CHECK(largest_error(fused_pass(*norm, x, dy), exact) < 1e-6);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    CAPTURE(dtype);
    const double unit = dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
    {
      const Autocast on(at::kCPU, dtype);
      const Pass found = fused_pass(*norm, x, dy.to(dtype));
      CHECK(found.y.scalar_type() == dtype);
      CHECK(found.dx.scalar_type() == at::kFloat);
      CHECK(relative_error(found.y, exact.y) < unit);
      CHECK(largest_error(found, exact_pass(norm, x, dy.to(dtype))) < unit);
    }
    modules::RmsNorm narrow =
        modules::RmsNorm(std::dynamic_pointer_cast<modules::RmsNormImpl>(norm->clone()));
    narrow->to(dtype);
    const Pass found = fused_pass(*narrow, x.to(dtype), dy.to(dtype));
    CHECK(found.y.scalar_type() == dtype);
    CHECK(found.gradients.at("weight").scalar_type() == dtype);
    CHECK(largest_error(found, exact_pass(narrow, x.to(dtype).to(at::kFloat), dy.to(dtype))) < 2 * unit);
  }
}

TEST_CASE("an RmsNorm refuses what it cannot do", "[modules][rms_norm][errors]") {
  CHECK_THROWS_WITH(modules::RmsNorm(0), ContainsSubstring("above 0, not 0"));
  modules::RmsNorm norm(32);
  CHECK_THROWS_WITH(norm(torch::zeros({2, 31})), ContainsSubstring("RmsNorm takes [..., 32], not [2, 31]"));
  CHECK_THROWS_WITH(norm(torch::zeros({2, 32}, at::kDouble)), ContainsSubstring("not in Double"));
  const Tensor x = batch().requires_grad_();
  CHECK_THROWS_WITH(torch::autograd::grad({norm(x).sum()}, {x}, {}, std::nullopt, /*create_graph=*/true),
                    ContainsSubstring("no second derivative"));
  const Tensor nothing = torch::zeros({0, 32}).requires_grad_();
  norm(nothing).sum().backward();
  CHECK(norm->weight.grad().equal(torch::zeros({32})));
}

TEST_CASE("fused layers with rms have the names of their parameters, but for biases of norms",
          "[modules][rms_norm]") {
  using modules::TransformerLayer;
  using modules::TransformerLayerOptions;
  const auto options = TransformerLayerOptions(32, 4).bias(false).eps(1e-3);
  const TransformerLayer plain(options);
  CHECK(names_of(*plain) == std::vector<std::string>{"qkv.norm.weight", "qkv.norm.bias", "qkv.linear.weight",
                                                     "projection.weight", "mlp.norm.weight", "mlp.norm.bias",
                                                     "mlp.fc1.weight", "mlp.fc2.weight"});
  CHECK(plain->qkv->norm->options.eps() == 1e-3);
  CHECK(plain->mlp->rms_norm.is_empty());
  const TransformerLayer by_rms(TransformerLayerOptions(options).normalization(Normalization::rms));
  CHECK(names_of(*by_rms) == std::vector<std::string>{"qkv.norm.weight", "qkv.linear.weight",
                                                      "projection.weight", "mlp.norm.weight",
                                                      "mlp.fc1.weight", "mlp.fc2.weight"});
  CHECK(by_rms->qkv->norm.is_empty());
  CHECK(by_rms->qkv->rms_norm->options.eps() == 1e-3);
  CHECK(by_rms->mlp->rms_norm->options.eps() == 1e-3);
}

}  // namespace pacer::testing::fused_layers
