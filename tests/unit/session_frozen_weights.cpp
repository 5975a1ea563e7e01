// Parameters that are not trained, in a Session.
#include <torch/nn/modules/linear.h>

#include <pacer/modules/linear.h>
#include <pacer/modules/nf4.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/schedulers/session.h>

#include "support/catch.h"

namespace pacer::testing::session_frozen_weights {
namespace {

using torch::Tensor;

}  // namespace

TEST_CASE("an optimizer may have parameters that never needed a gradient", "[session]") {
  torch::manual_seed(1);
  struct QuantizedImpl : torch::nn::Module {
    QuantizedImpl() {
      body = register_module("body", nn::Linear(64, 64));
      head = register_module("head", nn::Linear(64, 2));
    }
    nn::Linear body = nullptr, head = nullptr;
  } model;
  nn::quantize(model, nn::Nf4Options().targets({"body"}));
  nn::dequantize(model);
  const Tensor before = model.body->weight.clone();
  FusedAdamW optimizer(model.parameters(), FusedAdamWOptions(0.1));
  Session session(model, optimizer);
  const auto step = [&] {
    auto [x] = session.begin(torch::ones({2, 64}));
    session.backward(model.head(model.body(x)).square().mean());
    session.step();
  };
  step();
  CHECK(model.body->weight.equal(before));
  // From where it does need one it is trained as any other.
  model.body->weight.requires_grad_(true);
  step();
  CHECK_FALSE(model.body->weight.equal(before));
}

}  // namespace pacer::testing::session_frozen_weights
