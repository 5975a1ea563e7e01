// ParameterShards on a GPU, in a world of one rank: parts hold the gradients of whole backward passes to the
// bit, on any stream, without a wait for the device, and new values reach the parameters.
#include "support/catch.h"

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <pacer/parallel/parameter_shards.h>

#include "support/both_devices.h"
#include "support/no_waiting.h"

namespace pacer::testing::shards_gpu {
namespace {

const at::Device kGpu("cuda:0");
constexpr int64_t kInputs = 33, kWide = 70;

// Odd sizes, a layer that is used twice, and a parameter of one element.
struct NetImpl : torch::nn::Module {
  NetImpl()
      : first(register_module("first", torch::nn::Linear(kInputs, kWide))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWide})))),
        twice(register_module("twice", torch::nn::Linear(kWide, kWide))),
        last(register_module("last", torch::nn::Linear(kWide, 5))),
        scale(register_parameter("scale", torch::full({}, 1.5))) {}
  Tensor loss(const Tensor& x) {
    const Tensor h = twice(norm(twice(torch::relu(first(x)))));
    return (last(h) * scale).to(at::kFloat).square().mean();
  }
  torch::nn::Linear first;
  torch::nn::LayerNorm norm;
  torch::nn::Linear twice, last;
  Tensor scale;
};
TORCH_MODULE(Net);

Net make_net(at::ScalarType dtype) {
  torch::manual_seed(2);
  Net net;
  net->to(kGpu, dtype);
  return net;
}

Tensor inputs(int64_t number, at::ScalarType dtype) {
  torch::manual_seed(static_cast<uint64_t>(100 + number));
  return torch::randn({40, kInputs}, kGpu).to(dtype);
}

// A net whose gradients go to parts, and one of the same values that trains plainly.
struct Both {
  Both(at::ScalarType dtype, const ParameterShardsOptions& options)
      : dtype(dtype),
        plain(make_net(dtype)),
        net(make_net(dtype)),
        shards(named(net), Communicator::alone(kGpu), options) {}

  static std::vector<ParameterShards::NamedParameter> named(const Net& net) {
    std::vector<ParameterShards::NamedParameter> parameters;
    for (const auto& item : net->named_parameters()) parameters.emplace_back(item.key(), item.value());
    return parameters;
  }

  void backward(int64_t number, bool is_last) {
    const Tensor x = inputs(number, dtype);
    plain->loss(x).backward();
    ParameterShards::Pass pass;
    pass.is_last = is_last;
    shards.begin_backward(pass);
    net->loss(x).backward();
    shards.end_backward();
  }

  // The first parameter whose part has other bits than the plain gradient; "" for none.
  std::string first_difference() {
    const auto gradients = plain->named_parameters();
    if (shards.parts().size() != gradients.size()) return "the number of parts";
    for (const auto& part : shards.parts()) {
      const Tensor wanted = gradients[part.name].grad().view({-1}).narrow(0, part.first, part.count);
      if (part.count != part.parameter.numel() || !same_bits(part.gradient, wanted)) return part.name;
      if (part.parameter.grad().defined()) return part.name + ", which kept a gradient";
    }
    return "";
  }

  // A step of gradient descent: of the parts, and of the plain net.
  void update() {
    const torch::NoGradGuard no_grad;
    for (const auto& part : shards.parts()) {
      part.parameter.view({-1}).narrow(0, part.first, part.count).sub_(part.gradient, 0.1);
    }
    shards.gather_parameters();
    for (Tensor& parameter : plain->parameters()) parameter.sub_(parameter.grad(), 0.1);
    plain->zero_grad();
  }

  at::ScalarType dtype;
  Net plain, net;
  ParameterShards shards;
};

// Each parameter alone, a few units, and all in one; reduced in every pass, and once.
std::vector<ParameterShardsOptions> all_options() {
  std::vector<ParameterShardsOptions> all;
  for (const bool every : {false, true}) {
    for (const int64_t unit_bytes : {int64_t{1}, int64_t{5000}, ParameterShardsOptions().unit_bytes()}) {
      // As autograd adds up in the plain model.
      all.push_back(ParameterShardsOptions()
                        .unit_bytes(unit_bytes)
                        .reduce_every_backward(every)
                        .accumulate_in_fp32(false));
    }
  }
  return all;
}

}  // namespace

TEST_CASE("on a GPU, parts hold the gradients of whole backward passes, to the bit", "[gpu][shards]") {
  PACER_NEEDS_GPU();
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const ParameterShardsOptions& options : all_options()) {
      for (const int passes : {1, 3}) {
        CAPTURE(dtype, options.unit_bytes(), options.reduce_every_backward(), passes);
        Both both(dtype, options);
        for (int window = 0; window < 2; ++window) {
          for (int pass = 0; pass < passes; ++pass) {
            both.backward(window * passes + pass, pass + 1 == passes);
          }
          both.shards.wait();
          REQUIRE(both.first_difference() == "");
          both.plain->zero_grad();
        }
      }
    }
  }
}

TEST_CASE("on a GPU, gathered parameters have the new values, in memory and in graphs", "[gpu][shards]") {
  PACER_NEEDS_GPU();
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const ParameterShardsOptions& options : all_options()) {
      CAPTURE(dtype, options.unit_bytes(), options.reduce_every_backward());
      Both both(dtype, options);
      for (int step = 0; step < 3; ++step) {
        both.backward(step, true);
        both.shards.wait();
        REQUIRE(both.first_difference() == "");
        const Tensor old = both.net->loss(inputs(step, dtype));
        both.update();
        for (const auto& item : both.plain->named_parameters()) {
          CAPTURE(item.key());
          REQUIRE(same_bits(both.net->named_parameters()[item.key()], item.value()));
        }
        // A graph that has saved the old values must not go on with the new ones.
        CHECK_THROWS_WITH(old.backward(), Catch::Matchers::ContainsSubstring("modified by an inplace"));
        for (const Tensor& parameter : both.net->parameters()) parameter.mutable_grad().reset();
      }
    }
  }
}

TEST_CASE("gradients come together on the stream on which backward runs", "[gpu][shards]") {
  PACER_NEEDS_GPU();
  for (const ParameterShardsOptions& options : all_options()) {
    CAPTURE(options.unit_bytes(), options.reduce_every_backward());
    Both both(at::kFloat, options);
    torch::cuda::synchronize();
    const c10::cuda::CUDAStreamGuard on_stream(c10::cuda::getStreamFromPool());
    for (int step = 0; step < 3; ++step) {
      both.backward(2 * step, false);
      both.backward(2 * step + 1, true);
      both.shards.wait();
      REQUIRE(both.first_difference() == "");
      both.update();
    }
    REQUIRE(same_bits(both.net->parameters(), both.plain->parameters()));
  }
}

TEST_CASE("after a backward that threw, parts begin anew", "[gpu][shards]") {
  PACER_NEEDS_GPU();
  for (const ParameterShardsOptions& options : all_options()) {
    CAPTURE(options.unit_bytes(), options.reduce_every_backward());
    Both both(at::kFloat, options);
    both.backward(0, false);
    both.plain->zero_grad();
    const Tensor x = inputs(1, at::kFloat);
    Tensor loss = both.net->loss(x);
    const unsigned hook = both.net->first->bias.register_hook(
        [](const Tensor&) -> Tensor { throw std::runtime_error("somebody's hook fails"); });
    both.shards.begin_backward();
    CHECK_THROWS_WITH(loss.backward(), Catch::Matchers::ContainsSubstring("somebody's hook fails"));
    both.shards.drop();
    both.net->first->bias.remove_hook(hook);
    for (int pass = 2; pass < 4; ++pass) both.backward(pass, pass == 3);
    both.shards.wait();
    CHECK(both.first_difference() == "");
  }
}

TEST_CASE("parts of gradients never wait for the GPU", "[gpu][shards]") {
  PACER_NEEDS_GPU();
  for (const ParameterShardsOptions& options : all_options()) {
    CAPTURE(options.unit_bytes(), options.reduce_every_backward());
    Both both(at::kBFloat16, options);
    const auto step = [&](const Tensor& x) {
      for (const bool is_last : {false, true}) {
        ParameterShards::Pass pass;
        pass.is_last = is_last;
        both.shards.begin_backward(pass);
        both.net->loss(x).backward();
        both.shards.end_backward();
      }
      both.shards.wait();
      both.shards.gather_parameters();
    };
    const Tensor x = inputs(0, at::kBFloat16);
    step(x);  // libraries, memory
    const NoWaiting no_waiting;
    for (int i = 0; i < 3; ++i) CHECK_NOTHROW(step(x));
    CHECK_THROWS(x.sum().item<float>());  // the check itself works
  }
}

}  // namespace pacer::testing::shards_gpu
