// Products of 8-bit floats over weights in 4 bits: the bits of a layer whose weight was dequantized before,
// and nothing of a decoded weight's size that is alive between forward and backward.
#include "support/catch.h"

#include <ATen/ops/linear.h>
#include <torch/autograd.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/core/error.h>
#include <pacer/hooks/precision.h>
#include <pacer/modules/fp8_scaling.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>
#include <pacer/modules/recompute.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/session/session.h>

#include "support/cpu_memory.h"
#include "support/kernels/fp8_reference.h"
#include "support/message_of.h"
#include "support/modules/autocast.h"
#include "support/temporary_folder.h"

namespace pacer::testing::fp8_nf4 {
namespace {

using Catch::Matchers::ContainsSubstring;

Fp8Options over_4_bits() { return Fp8Options().quantized_weights(true); }

// One of its layers has no adapter, and two share their input.
struct NetImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) {
    const auto both = modules::forward_together(x, {gate, up});
    return last(down(both[0].tanh() * both[1]));
  }
  modules::Linear gate =
      register_module("gate", modules::Linear(torch::nn::LinearOptions(48, 64).bias(false)));
  modules::Linear up = register_module("up", modules::Linear(48, 64));
  modules::Linear down = register_module("down", modules::Linear(64, 32));
  modules::Linear last = register_module("last", modules::Linear(32, 16));
};
TORCH_MODULE(Net);

// The same numbers each time; biases are trained, too, and weights that are 4 bits' no more are frozen.
Net adapted(at::ScalarType dtype, bool doubly, bool is_dequantized) {
  torch::manual_seed(3);
  Net net;
  net->to(dtype);
  const std::vector<std::string> layers = {"gate", "up", "down", "last"};
  modules::quantize(*net, modules::Nf4Options().targets(layers).double_quantization(doubly));
  modules::add_lora(*net, modules::LoraOptions(4).alpha(8).targets({"gate", "up", "down"}));
  const torch::NoGradGuard no_grad;
  for (const auto& item : modules::trainable(*net)) item.value().normal_(0, 0.1);
  for (const modules::Linear& layer : {net->up, net->down, net->last}) layer->bias.requires_grad_(true);
  if (is_dequantized) modules::dequantize(*net);
  return net;
}

std::vector<Tensor> gradients(Net& net, const Tensor& x, const Tensor& y, const Tensor& dy) {
  std::vector<Tensor> inputs = {x};
  for (const auto& item : modules::trainable(*net)) inputs.push_back(item.value());
  return torch::autograd::grad({y}, inputs, {dy});
}

void check_same_state(const Fp8Scaling& found, const Fp8Scaling& wanted) {
  REQUIRE(found.state().size() == wanted.state().size());
  for (const auto& [name, tensor] : wanted.state()) {
    CAPTURE(name);
    CHECK(found.state().at(name).equal(tensor));
  }
}

struct Run {
  Net net = adapted(at::kFloat, true, false);
  FusedAdamW optimizer{modules::trainable(*net), FusedAdamWOptions(1e-2)};
  Session session{*net, optimizer};
  std::shared_ptr<Precision> precision;

  Run(const Fp8Options& options, const std::string& folder)
      : precision(std::make_shared<Precision>(Precision::fp8(options))) {
    session.use(precision);
    if (!folder.empty()) session.use(Checkpoints(CheckpointsOptions(folder).every(4).save_frozen(false)));
  }
  void train(int64_t until) {
    while (session.progress().step < until) {
      const auto step = session.progress().step;
      torch::manual_seed(100 + step);
      auto [x] = session.begin(torch::randn({16, 48}) * (step + 1));
      session.backward(net(x).to(at::kFloat).square().mean());
      session.step();
    }
  }
  NamedTensors scales() const {
    NamedTensors state;
    precision->save(state);
    return state;
  }
};

}  // namespace

TEST_CASE("over 4 bits a layer in 8 computes what it computes over the dequantized weight", "[fp8][nf4]") {
  const std::vector<Fp8Options> recipes = {
      over_4_bits(), over_4_bits().power_of_two(false).margin(0).gradients(at::kFloat8_e4m3fn),
      over_4_bits().recipe(Fp8Recipe::current)};
  for (const Fp8Options& options : recipes) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const bool doubly : {false, true}) {
        CAPTURE(options.recipe() == Fp8Recipe::delayed, options.margin(), dtype, doubly);
        Net found = adapted(dtype, doubly, false), wanted = adapted(dtype, doubly, true);
        REQUIRE_FALSE(found->up->nf4().is_empty());
        REQUIRE(wanted->up->nf4().is_empty());
        const auto of_found = std::make_shared<Fp8Scaling>(*found, options);
        const auto of_wanted = std::make_shared<Fp8Scaling>(*wanted, options);
        CHECK(of_found->layers() == 4);
        for (int step = 0; step < 3; ++step) {
          const Tensor x = (torch::randn({2, 16, 48}) * (step + 1)).to(dtype).requires_grad_();
          Tensor y, reference;
          {
            const Fp8Scope scope(of_found);
            y = found(x);
          }
          {
            const Fp8Scope scope(of_wanted);
            reference = wanted(x);
          }
          REQUIRE(y.scalar_type() == (dtype == at::kFloat ? at::kBFloat16 : dtype));
          CHECK(y.equal(reference));
          CHECK_FALSE(y.equal(found(x).to(y.scalar_type())));  // 16 bits compute something else
          const Tensor dy = torch::randn_like(y);
          const auto all = gradients(found, x, y, dy), references = gradients(wanted, x, reference, dy);
          REQUIRE(all.size() == 1 + 3 * 2 + 3);
          for (size_t i = 0; i < all.size(); ++i) CHECK(all[i].equal(references[i]));
          of_found->update();
          of_wanted->update();
          check_same_state(*of_found, *of_wanted);
        }
        CHECK(of_found->other_calls() == 0);
      }
    }
  }
}

TEST_CASE("a product over 4 bits is that of the codes of the decoded weight", "[fp8][nf4]") {
  torch::manual_seed(5);
  modules::Linear layer(torch::nn::LinearOptions(64, 32).bias(false));
  layer->set_nf4(modules::Nf4Weight(layer->weight, true));
  const auto scaling = std::make_shared<Fp8Scaling>(*layer, over_4_bits().recipe(Fp8Recipe::current));
  const auto codes = [](const Tensor& matrix) {
    const float scale = kernels::fp8_scale(amax_bits(matrix), kernels::Fp8Format::e4m3, {});
    const Tensor bytes = fp8_codes(matrix, scale, kernels::Fp8Format::e4m3);
    return bytes.view(at::kFloat8_e4m3fn).to(at::kFloat).to(at::kDouble) / scale;
  };
  const Tensor x = torch::randn({16, 64});
  const Fp8Scope scope(scaling);
  const Tensor wanted = codes(x).mm(codes(layer->nf4()->decode(at::kFloat)).t());
  CHECK(layer(x).to(at::kDouble).allclose(wanted, 1.0 / 256, 1e-5));
}

TEST_CASE("nothing of a decoded weight's size is alive between forward and backward", "[fp8][nf4]") {
  constexpr int64_t kSize = 512, kLayers = 4, kRows = 16;
  torch::manual_seed(6);
  std::vector<modules::Linear> layers;
  torch::nn::ModuleList model;
  for (int64_t i = 0; i < kLayers; ++i) {
    layers.emplace_back(kSize, kSize);
    layers.back()->set_nf4(modules::Nf4Weight(layers.back()->weight, true));
    layers.back()->bias.requires_grad_(false);
    if (i % 2 == 0) layers.back()->add_adapter(modules::LoraOptions(4));
    model->push_back(layers.back());
  }
  const auto scaling = std::make_shared<Fp8Scaling>(*model, over_4_bits());
  const Tensor x = torch::randn({kRows, kSize}).requires_grad_();
  const CountedCpuMemory memory;
  for (int pass = 0; pass < 2; ++pass) {
    const int64_t before = CountedCpuMemory::live();
    CountedCpuMemory::reset_peak();
    Tensor h = x;
    {
      const Fp8Scope scope(scaling);
      for (modules::Linear& layer : layers) h = layer(h);
    }
    CAPTURE(pass, CountedCpuMemory::live() - before, CountedCpuMemory::peak() - before);
    // Activations and what adapters keep are less than one weight of one byte an element.
    CHECK(CountedCpuMemory::live() - before < kSize * kSize);
    h.sum().backward();
    CHECK(CountedCpuMemory::live() - before < kSize * kSize);
    // One layer at a time: on a CPU, products of 8-bit floats take three matrices in fp32.
    CHECK(CountedCpuMemory::peak() - before < 14 * kSize * kSize);
    scaling->update();
  }
}

TEST_CASE("a weight in 4 bits that is replaced or converted is measured anew", "[fp8][nf4]") {
  torch::manual_seed(7);
  modules::Linear layer(32, 32);
  const Tensor large = layer->weight.detach() * 300;
  layer->set_nf4(modules::Nf4Weight(layer->weight, true));
  const auto scaling = std::make_shared<Fp8Scaling>(*layer, over_4_bits().power_of_two(false));
  const Tensor x = torch::randn({16, 32});
  const auto is_current = [&] {
    const auto fresh = std::make_shared<Fp8Scaling>(*layer, scaling->options());
    Tensor wanted;
    {
      const Fp8Scope scope(fresh);
      wanted = layer(x);
    }
    const Fp8Scope scope(scaling);
    return layer(x).equal(wanted);
  };
  CHECK(is_current());
  layer->set_nf4(modules::Nf4Weight(large, true));
  CHECK(is_current());
  const modules::Nf4Weight larger(large * 8, true);
  larger->codes.set_data(layer->nf4()->codes);  // the same ones, in the same memory
  layer->set_nf4(larger);
  CHECK(is_current());
  const modules::Nf4Weight small(large / 1e4, true);
  {
    const torch::NoGradGuard no_grad;
    for (const auto& item : small->named_buffers())
      layer->nf4()->named_buffers()[item.key()].copy_(item.value());
  }
  CHECK(is_current());
  // Other memory with the version that the former one had, as where a module is moved.
  const modules::Nf4Weight moved(large * 8, true);
  for (const auto& item : moved->named_buffers())
    layer->nf4()->named_buffers()[item.key()].set_data(item.value());
  CHECK(is_current());
  layer->to(at::kBFloat16);
  CHECK(is_current());
  // Storage may change while the scaling exists.
  layer->dequantize();
  CHECK(is_current());
  modules::quantize(*layer, modules::Nf4Options().targets({"*"}));
  CHECK(is_current());
}

TEST_CASE("over 4 bits, too, sizes that are no multiples of 16 run in 16 bits and are counted",
          "[fp8][nf4]") {
  Net net = adapted(at::kFloat, true, false);
  const Tensor x = torch::randn({5, 48});
  Tensor wanted;
  {
    const Autocast autocast(at::kCPU);
    wanted = net(x);
  }
  const auto scaling = std::make_shared<Fp8Scaling>(*net, over_4_bits());
  const Fp8Scope scope(scaling);
  CHECK(net(x).equal(wanted));
  CHECK(scaling->other_calls() == 4);
  CHECK(net(torch::randn({0, 48})).numel() == 0);
  CHECK_THROWS(net(torch::randn({16, 47})));
  CHECK(net->last(torch::randn({16, 32}, at::kDouble)).scalar_type() == at::kDouble);
}

TEST_CASE("layers over 4 bits are recomputed with the scales of their first pass", "[fp8][nf4]") {
  std::vector<std::vector<Tensor>> all;
  std::vector<std::shared_ptr<Fp8Scaling>> scalings;
  const Tensor x = torch::randn({16, 48}).requires_grad_();
  for (const bool recomputes : {false, true}) {
    Net net = adapted(at::kBFloat16, true, false);
    scalings.push_back(std::make_shared<Fp8Scaling>(*net, over_4_bits()));
    for (int step = 0; step < 3; ++step) {
      Tensor y;
      {
        const Autocast autocast(at::kCPU);
        const Fp8Scope scope(scalings.back());
        y = recomputes ? recompute(*net, &NetImpl::forward, x) : net(x);
      }
      net->zero_grad();
      y.to(at::kFloat).square().sum().backward();
      scalings.back()->update();
    }
    all.emplace_back();
    for (const auto& item : modules::trainable(*net)) all.back().push_back(item.value().grad());
  }
  for (size_t i = 0; i < all[0].size(); ++i) CHECK(all[1][i].equal(all[0][i]));
  check_same_state(*scalings[1], *scalings[0]);
}

TEST_CASE("weights in 4 bits compute in 8 only if they are asked to", "[fp8][nf4]") {
  Net net = adapted(at::kFloat, true, false);
  const auto refused = [&](const Fp8Options& options, const char* reason) {
    CHECK_THAT(message_of<InvalidArgument>([&] { Fp8Scaling(*net, options); }), ContainsSubstring(reason));
  };
  refused({}, "only with Fp8Options::quantized_weights");
  refused(over_4_bits().keep_first(4), "leave none of the 4");
  net->last->dequantize();
  CHECK(Fp8Scaling(*net).layers() == 1);
  // Scales of a run that had them in 16 bits do not say how they are scaled.
  CHECK_THAT(message_of<InvalidArgument>(
                 [&] { Fp8Scaling(*net, over_4_bits()).set_state(Fp8Scaling(*net).state()); }),
             ContainsSubstring("has no \"gate.input.scale\""));
  CHECK(Fp8Scaling(*net, over_4_bits().keep_first(1)).layers() == 3);

  // Of layers that are put in 4 bits later, too.
  modules::dequantize(*net);
  const auto scaling = std::make_shared<Fp8Scaling>(*net);
  CHECK(scaling->layers() == 4);
  modules::quantize(*net, modules::Nf4Options().targets({"last"}));
  {
    const Autocast autocast(at::kCPU);
    const Fp8Scope scope(scaling);
    const Tensor x = torch::randn({16, 32});
    CHECK(net->last(x).equal(at::linear(x.to(at::kBFloat16), net->last->nf4()->decode(at::kBFloat16),
                                        net->last->bias.to(at::kBFloat16))));
  }

  const auto over = std::make_shared<Fp8Scaling>(*net, over_4_bits());
  const Fp8Scope scope(over);
  const Tensor x = torch::randn({16, 32}).requires_grad_();
  const Tensor y = net->last(x).sum();
  CHECK_THROWS_WITH(torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true),
                    ContainsSubstring("no second derivative"));
}

TEST_CASE("a run over 4 bits in 8 is resumed to the bit, scales included", "[fp8][nf4][session]") {
  const TemporaryFolder folder;
  Run unbroken(over_4_bits(), "");
  unbroken.train(9);
  {
    Run first(over_4_bits(), folder.path());
    first.train(4);
    first.session.finish();
  }
  Run resumed(over_4_bits(), folder.path());
  REQUIRE(resumed.session.resume() == 4);
  resumed.train(9);
  for (const auto& item : modules::trainable(*unbroken.net)) {
    CHECK(item.value().equal(modules::trainable(*resumed.net)[item.key()]));
  }
  const NamedTensors wanted = unbroken.scales(), found = resumed.scales();
  REQUIRE(wanted.size() == 4 * 4);
  REQUIRE(found.size() == wanted.size());
  for (const auto& [name, tensor] : wanted) CHECK(found.at(name).equal(tensor));
}

}  // namespace pacer::testing::fp8_nf4
