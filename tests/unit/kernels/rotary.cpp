// Norms and rotations of heads on the CPU beside LibTorch's operators in fp64, forward and backward.
#include "support/catch.h"

#include <cmath>
#include <string>

#include <ATen/ops/rms_norm.h>

#include "support/kernels/rotary.h"

namespace pacer::testing::kernels_rotary {
namespace {

constexpr float kEpsilon = 1e-5f;
const std::vector<RotaryShape> kShapes = {{1, 1, 1, 1, 2},  {2, 3, 4, 2, 8},  {1, 7, 3, 1, 10},
                                          {2, 5, 4, 4, 64}, {1, 9, 2, 1, 96}, {3, 11, 6, 2, 128},
                                          {1, 4, 1, 1, 512}};

double unit_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? 0x1p-24 : dtype == at::kBFloat16 ? 0x1p-8 : 0x1p-11;
}

void check_close(const Tensor& found, const Tensor& wanted, double relative, const Tensor& absolute) {
  const Tensor bound = wanted.abs() * relative + absolute;
  REQUIRE((found.to(at::kDouble) - wanted).abs().le(bound).all().item<bool>());
}

Tensor leaf(const Tensor& tensor) { return tensor.to(at::kDouble).detach().clone().requires_grad_(); }

// The definition by operators: [rows, heads * head_dim] normalised and turned, as transformers' rotate_half has it.
Tensor prepared(const Tensor& heads, const Tensor& weight, const RotaryInput& in) {
  const RotaryShape& shape = in.shape;
  Tensor x = heads.view({shape.batch, shape.sequence, -1, shape.head_dim});
  if (weight.defined()) x = at::rms_norm(x, {shape.head_dim}, weight, kEpsilon);
  if (in.cosines.defined()) {
    const auto twice = [](const Tensor& angles) {  // [sequence, 1, head_dim]
      return torch::cat({angles, angles}, 1).to(at::kDouble).unsqueeze(1);
    };
    const auto halves = x.chunk(2, -1);
    x = x * twice(in.cosines) + torch::cat({-halves[1], halves[0]}, -1) * twice(in.sines);
  }
  return x.reshape(heads.sizes());
}

}  // namespace

TEST_CASE("heads are normalised and turned, and gradients turned back, as in fp64", "[kernels][rotary]") {
  torch::manual_seed(1);
  for (const RotaryTypes& types : kRotaryTypes) {
    for (const RotaryShape& shape : kShapes) {
      for (const bool is_rotated : {true, false}) {
        for (const bool has_norms : {true, false}) {
          CAPTURE(types.heads, types.parameter, shape.rows(), shape.head_dim, is_rotated, has_norms);
          const RotaryInput in = random_rotary(types, shape, is_rotated, has_norms);
          const RotaryOutput out = both_ways(in, [](const auto& work) { run_rotary(work); });

          const Tensor qkv = leaf(in.qkv);
          const Tensor q_weight = has_norms ? leaf(in.q_weight) : Tensor(),
                       k_weight = has_norms ? leaf(in.k_weight) : Tensor();
          const auto parts = qkv.split_with_sizes({shape.q_width(), shape.kv_width(), shape.kv_width()}, 1);
          const Tensor q = prepared(parts[0].contiguous(), q_weight, in),
                       k = prepared(parts[1].contiguous(), k_weight, in);
          torch::autograd::backward({q, k, parts[2]},
                                    {in.dq.to(at::kDouble), in.dk.to(at::kDouble), in.dv.to(at::kDouble)});
          const double unit = unit_of(types.heads) * 1.001;
          const Tensor qk = torch::cat({q, k}, 1).detach();
          check_close(out.qk, qk, unit, 2e-6 * (1 + qk.abs().amax()));
          const Tensor dqkv = qkv.grad();
          check_close(out.dqkv, dqkv, unit, 1e-5 * (1 + dqkv.abs().amax()));
          if (!has_norms) continue;
          check_close(out.dq_weight, q_weight.grad(), 1e-5, 1e-5 * q_weight.grad().abs().amax() + 1e-5);
          check_close(out.dk_weight, k_weight.grad(), 1e-5, 1e-5 * k_weight.grad().abs().amax() + 1e-5);
        }
      }
    }
  }
}

TEST_CASE("heads are turned in place, and what is read keeps its bits where it is written elsewhere",
          "[kernels][rotary]") {
  torch::manual_seed(2);
  for (const RotaryTypes& types : kRotaryTypes) {
    const RotaryInput in = random_rotary(types, {2, 6, 4, 2, 16}, true, false);
    const Tensor before = in.qkv.clone();
    const RotaryOutput out = both_ways(in, [](const auto& work) { run_rotary(work); });
    REQUIRE(in.qkv.equal(before));
    kernels::RotaryForward work = rotary_forward_of(in, in.qkv);
    run_rotary(work);
    REQUIRE(in.qkv.narrow(1, 0, 96).equal(out.qk));
    REQUIRE(in.qkv.narrow(1, 96, 32).equal(before.narrow(1, 96, 32)));
    REQUIRE(out.dqkv.narrow(1, 96, 32).equal(in.dv));
  }
}

TEST_CASE("sums of weights' gradients over more rows than parts are those of fp64", "[kernels][rotary]") {
  torch::manual_seed(3);
  const RotaryInput in = random_rotary(kRotaryTypes[0], {1, 2500, 3, 1, 16}, false, true);
  CHECK(kernels::rotary_parts(2500) == 834);
  const RotaryOutput out = both_ways(in, [](const auto& work) { run_rotary(work); });
  const Tensor q = in.qkv.narrow(1, 0, 48).to(at::kDouble).reshape({-1, 16});
  const Tensor normalized = q * (q.square().mean(1, true) + kEpsilon).rsqrt();
  const Tensor wanted = (normalized * in.dq.to(at::kDouble).view({-1, 16})).sum(0);
  check_close(out.dq_weight, wanted, 1e-6, at::full({}, 1e-4));
}

TEST_CASE("a rotation of heads refuses what it cannot do", "[kernels][rotary][errors]") {
  using Catch::Matchers::ContainsSubstring;
  const RotaryInput in = random_rotary(kRotaryTypes[1], {1, 2, 2, 1, 8}, true, true);
  RotaryOutput out;
  const Tensor qk = at::zeros({2, 24}, at::kBFloat16);
  const kernels::RotaryForward good = rotary_forward_of(in, qk);
  CHECK_NOTHROW(kernels::rotary_cpu(good, 0, 2));
  const auto refuses = [&](const auto& spoil, const std::string& part) {
    kernels::RotaryForward work = good;
    spoil(work);
    CHECK_THROWS_WITH(kernels::rotary_cpu(work, 0, 2), ContainsSubstring(part));
  };
  refuses([](auto& work) { work.head_dim = 7; }, "even number of channels, at most 512, not 7");
  refuses([](auto& work) { work.head_dim = 514; }, "not 514");
  refuses([](auto& work) { work.sines = nullptr; }, "cosines and sines");
  refuses([](auto& work) { work.sequence = 0; }, "not 2 and 0");
  refuses([](auto& work) { work.q.to = nullptr; }, "memory for its queries");
  refuses([](auto& work) { work.k.from_stride = 7; }, "strides 7 and 24");
  refuses([](auto& work) { work.parameter_type = kernels::ElementType::f16; }, "parameters of 32 bits");

  out.dqkv = at::zeros({2, 32}, at::kBFloat16);
  out.dq_weight = at::zeros({8});
  out.dk_weight = at::zeros({8});
  const Tensor partials = at::zeros({2, 2, 8});
  const auto refuses_back = [&](const auto& spoil, const std::string& part) {
    kernels::RotaryBackward work = rotary_backward_of(in, out, partials);
    spoil(work);
    CHECK_THROWS_WITH(kernels::rotary_backward_cpu(work, 0, 2), ContainsSubstring(part));
  };
  refuses_back([](auto& work) { work.q_read = nullptr; }, "what they have normalised");
  refuses_back([](auto& work) { work.partials = nullptr; }, "partial sums");
  refuses_back([](auto& work) { work.k.weight = nullptr; }, "no gradient of its weight");
}

}  // namespace pacer::testing::kernels_rotary
