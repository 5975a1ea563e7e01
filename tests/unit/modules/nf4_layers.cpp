// Linear layers whose weights are in 4 bits: what they compute beside the decoded weight, what becomes of
// them when a model is moved, cloned, saved and put back, and what is refused.
#include "support/catch.h"

#include <limits>

#include <torch/autograd.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <pacer/core/error.h>
#include <pacer/modules/fp8_scaling.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>

#include "support/message_of.h"
#include "support/modules/autocast.h"

namespace pacer::testing::nf4_layers {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::Nf4Options;
using torch::Tensor;

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t in = 96, int64_t hidden = 70, int64_t out = 33) {
    up = register_module("up", modules::Linear(in, hidden));
    down = register_module("down", modules::Linear(torch::nn::LinearOptions(hidden, out).bias(false)));
    head = register_module("head", torch::nn::Linear(out, 3));
  }
  Tensor forward(const Tensor& x) { return head(down(up(x).tanh())); }
  modules::Linear up = nullptr, down = nullptr;
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE(Net);

Nf4Options both(bool doubly = true) {
  return Nf4Options().targets({"up", "down"}).double_quantization(doubly);
}

double relative(const Tensor& found, const Tensor& wanted) {
  return ((found.to(at::kDouble) - wanted.to(at::kDouble)).norm() / wanted.to(at::kDouble).norm())
      .item<double>();
}

}  // namespace

TEST_CASE("a layer in 4 bits multiplies by what its codes stand for, forward and backward", "[nf4][lora]") {
  for (const bool doubly : {false, true}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      CAPTURE(doubly, dtype);
      torch::manual_seed(2);
      Net net;
      {
        const torch::NoGradGuard no_grad;
        net->up->weight.normal_();
        net->down->weight.normal_();
      }
      net->to(dtype);
      const Tensor weight = net->up->weight.detach().clone();
      net->up->eval();
      CHECK(modules::quantize(*net, both(doubly)) == std::vector<std::string>{"up", "down"});
      CHECK_FALSE(net->up->nf4()->is_training());
      CHECK(net->down->nf4()->is_training());
      net->up->train();
      CHECK_FALSE(net->up->weight.defined());
      CHECK(net->named_parameters().keys() ==
            std::vector<std::string>{"up.bias", "head.weight", "head.bias"});
      CHECK(net->named_buffers().contains("down.weight.codes"));
      const Tensor decoded = net->up->nf4()->decode(dtype);
      CHECK(relative(decoded, weight) == Catch::Approx(0.092).margin(0.003));

      const Tensor x = torch::randn({5, 96}).to(dtype).requires_grad_();
      CHECK(net->up(x).equal(at::linear(x, decoded, net->up->bias)));
      const Tensor dx = torch::autograd::grad({net->up(x).sum()}, {x})[0];
      const Tensor wanted = torch::autograd::grad({at::linear(x, decoded).sum()}, {x})[0];
      CHECK(relative(dx, wanted) < (dtype == at::kFloat ? 1e-6 : 1e-2));

      // Quantising twice changes nothing, and back it is what the codes held.
      modules::quantize(*net, both(!doubly));
      CHECK(net->up->nf4()->double_quantization == doubly);
      CHECK(modules::dequantize(*net) == std::vector<std::string>{"up", "down"});
      CHECK(net->up->weight.equal(decoded));
      CHECK_FALSE(net->up->weight.requires_grad());
      CHECK(net->named_buffers().is_empty());
    }
  }
}

TEST_CASE("adapters over 4 bits are trained, and merged only into 16 bits or more", "[nf4][lora]") {
  torch::manual_seed(4);
  Net net;
  modules::quantize(*net, both());
  modules::add_lora(*net, modules::LoraOptions(4).alpha(8).targets({"up", "down"}));
  const Tensor x = torch::randn({64, 96}), y = torch::randn({64, 3});
  const auto loss = [&] { return torch::mse_loss(net->forward(x), y); };
  const double before = loss().item<double>();
  const Tensor codes = net->up->nf4()->codes.clone();
  for (int step = 0; step < 50; ++step) {
    net->zero_grad();
    loss().backward();
    const torch::NoGradGuard no_grad;
    for (const auto& item : modules::trainable(*net)) item.value().sub_(item.value().grad(), 0.3);
  }
  CHECK(loss().item<double>() < 0.8 * before);
  CHECK(net->up->nf4()->codes.equal(codes));
  CHECK_THAT(message_of<InvalidArgument>([&] { modules::merge(*net); }),
             ContainsSubstring("dequantize() the model first"));
  CHECK_FALSE(net->down->is_merged());
  const Tensor adapted = net->forward(x);
  modules::dequantize(*net);
  CHECK(torch::allclose(net->forward(x), adapted, 1e-5, 1e-5));
  modules::merge(*net);
  CHECK(torch::allclose(net->forward(x), adapted, 1e-4, 1e-5));
}

TEST_CASE("codes and scales keep their dtypes wherever the model goes", "[nf4][lora]") {
  for (const bool doubly : {false, true}) {
    Net net;
    modules::quantize(*net, both(doubly));
    const Tensor x = torch::randn({3, 96});
    const Tensor y = net->forward(x);
    const auto buffers = net->named_buffers();
    net->to(at::kBFloat16);
    net->to(at::Device(at::kCPU), at::kFloat);
    net->to(at::Device(at::kCPU));
    for (const auto& item : net->named_buffers()) {
      CHECK(item.value().scalar_type() == buffers[item.key()].scalar_type());
      CHECK(item.value().equal(buffers[item.key()]));
    }
    CHECK(net->up->nf4()->dtype == at::kFloat);
    CHECK(net->up(x).scalar_type() == at::kFloat);

    const auto clone = std::dynamic_pointer_cast<modules::LinearImpl>(net->up->clone());
    CHECK(clone->forward(x).equal(net->up(x)));
    clone->nf4()->codes.zero_();
    CHECK_FALSE(clone->forward(x).equal(net->up(x)));

    std::stringstream file;
    torch::save(net, file);
    Net other;
    modules::quantize(*other, both(doubly));
    torch::load(other, file);
    CHECK(other->up(x).equal(net->up(x)));
  }
}

TEST_CASE("a zero weight, an empty one and one of odd size in 4 bits", "[nf4][lora]") {
  modules::Linear zero(16, 4), odd(7, 3), empty(0, 3);
  torch::nn::Sequential model(zero, odd, empty);
  {
    const torch::NoGradGuard no_grad;
    zero->weight.zero_();
  }
  const Tensor weight = odd->weight.detach().clone();
  modules::quantize(*model, Nf4Options().targets({"*"}));
  CHECK(zero->nf4()->decode(at::kFloat).count_nonzero().item<int64_t>() == 0);
  CHECK(odd->nf4()->codes.sizes() == at::IntArrayRef({11, 1}));
  CHECK(relative(odd->nf4()->decode(at::kFloat), weight) < 0.2);
  CHECK(empty(torch::zeros({2, 0})).equal(empty->bias.expand({2, 3})));
}

TEST_CASE("bits an element are those of the formula", "[nf4][lora]") {
  modules::Linear layer(1024, 1024);
  torch::nn::Sequential model(layer);
  modules::quantize(*model, Nf4Options().targets({"0"}));
  const double bits = 8.0 * static_cast<double>(layer->nf4()->bytes() - 4 * 257) / (1024 * 1024);
  CHECK(bits == Catch::Approx(4 + 8.0 / 64 + 32.0 / (64 * 256)).epsilon(1e-9));
}

TEST_CASE("what cannot be in 4 bits is refused with the reason, and nothing has changed", "[nf4][lora]") {
  Net net;
  const auto refused = [&](const Nf4Options& wrong, const char* reason) {
    CHECK_THAT(message_of<InvalidArgument>([&] { modules::quantize(*net, wrong); }),
               ContainsSubstring(reason));
    CHECK(net->named_buffers().is_empty());
  };
  refused(Nf4Options(), "needs targets");
  refused(Nf4Options().targets({"up", "nothing"}), "\"nothing\" matches no pacer::modules::Linear");
  refused(Nf4Options().targets({"head"}), "head is a torch::nn::Linear");
  {
    const torch::NoGradGuard no_grad;
    net->down->weight[1][2] = std::numeric_limits<float>::infinity();
  }
  refused(both(), "the weight of down has elements that are not finite");
  net->down->to(at::kDouble);
  refused(both(), "the weight of down is Double");
  for (const auto& [out, in] : {std::pair(3, 4), std::pair(70, 4), std::pair(3, 96)}) {
    const modules::Nf4Weight wrong(out, in, at::kFloat, true);
    CHECK_THAT(message_of<InvalidArgument>([&] { net->up->set_nf4(wrong); }), ContainsSubstring("70 x 96"));
  }
  CHECK_THAT(message_of<InvalidArgument>([] { modules::Nf4Weight(3, 4, at::kLong, true); }),
             ContainsSubstring("Long"));
}

TEST_CASE("layers in 4 bits compute in 16 where others compute in 8", "[nf4][fp8]") {
  torch::manual_seed(9);
  Net net(32, 32, 32);
  modules::quantize(*net, Nf4Options().targets({"up"}));
  auto scaling = std::make_shared<Fp8Scaling>(*net);
  CHECK(scaling->layers() == 1);
  const Fp8Scope scope(scaling);
  const Autocast autocast(at::kCPU);
  const Tensor x = torch::randn({16, 32});
  CHECK(net->up(x).equal(at::linear(x.to(at::kBFloat16), net->up->nf4()->decode(at::kBFloat16),
                                    net->up->bias.to(at::kBFloat16))));

  // An adapter over 8 bits adds to what they compute.
  const Tensor plain = net->down(x).detach();
  net->down->add_adapter(modules::LoraOptions(4));
  CHECK(net->down(x).equal(plain));
  const torch::NoGradGuard no_grad;
  net->down->adapter("default")->B.fill_(0.5);
  CHECK_FALSE(net->down(x).equal(plain));
}

}  // namespace pacer::testing::nf4_layers
