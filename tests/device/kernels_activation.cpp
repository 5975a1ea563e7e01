// Activations on a GPU have the bytes of the CPU, apart from those of a NaN: values, codes, transposes, amax
// and sums, from run to run.
#include "support/catch.h"

#include <ATen/ops/from_blob.h>
#include <torch/types.h>

#include <pacer/device/detail/stream.h>

#include "support/both_devices.h"
#include "support/kernels/activation_reference.h"

namespace pacer::testing::kernels_activation_gpu {
namespace {

const at::Device kGpu("cuda:0");
constexpr Activation kActivations[] = {Activation::gelu, Activation::swiglu};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

struct Inputs {
  Tensor u, bias, dy;  // no dy: forward

  Inputs to_gpu() const {
    const auto moved = [](const Tensor& tensor) { return tensor.defined() ? tensor.to(kGpu) : tensor; };
    return {moved(u), moved(bias), moved(dy)};
  }
};

ActivationResults run(Activation activation, const Inputs& inputs, const ActivationWishes& wishes) {
  const auto enqueue = [&](const auto& work) {
    const auto stream = [&] { return detail::current_stream(inputs.u.device()); };
    if constexpr (std::is_same_v<std::decay_t<decltype(work)>, kernels::ActivationForward>) {
      inputs.u.is_cuda() ? kernels::activation_cuda(work, stream())
                         : kernels::activation_cpu(work, 0, work.rows);
    } else {
      inputs.u.is_cuda() ? kernels::activation_backward_cuda(work, stream())
                         : kernels::activation_backward_cpu(work, 0, work.rows);
    }
  };
  return run_activation(activation, inputs.u, inputs.bias, inputs.dy, wishes, enqueue);
}

bool same(const Tensor& on_gpu, const Tensor& on_cpu) {
  if (!on_cpu.defined()) return !on_gpu.defined();
  const Tensor found = on_gpu.cpu();
  if (!found.is_floating_point()) return found.equal(on_cpu);
  const Tensor nan = on_cpu.isnan();
  const auto bits = [&](const Tensor& values) {
    return values.masked_fill(nan, 0).contiguous().view(values.element_size() == 4 ? at::kInt : at::kShort);
  };
  return found.isnan().equal(nan) && bits(found).equal(bits(on_cpu));
}

void compare(Activation activation, const Inputs& inputs, const ActivationWishes& wishes) {
  const ActivationResults wanted = run(activation, inputs, wishes);
  const Inputs on_gpu = inputs.to_gpu();
  for (int repetition = 0; repetition < 2; ++repetition) {
    const ActivationResults found = run(activation, on_gpu, wishes);
    REQUIRE(same(found.values, wanted.values));
    REQUIRE(same(found.codes, wanted.codes));
    REQUIRE(same(found.transposed, wanted.transposed));
    REQUIRE(same(found.inverse, wanted.inverse));
    REQUIRE(same(found.measured, wanted.measured));
    REQUIRE(same(found.state, wanted.state));
    REQUIRE(same(found.partials, wanted.partials));
    REQUIRE(same(found.sums, wanted.sums));
  }
}

// Every combination of results that makes sense.
std::vector<ActivationWishes> all_wishes(bool backward, bool transposes) {
  std::vector<ActivationWishes> all;
  for (const bool values : {false, true}) {
    for (const bool codes : {false, true}) {
      for (const bool measures : {false, true}) {
        for (const bool sums : {false, true}) {
          for (const float scale : {0.0f, 4.0f}) {
            if ((sums && !backward) || (measures && codes)) continue;
            ActivationWishes wishes;
            wishes.values = values;
            wishes.codes = codes;
            wishes.measures = measures;
            wishes.sums = sums;
            wishes.scale = scale;
            wishes.amax = codes ? kernels::bits_of(50.0f) : 0;
            wishes.format = backward ? kernels::Fp8Format::e5m2 : kernels::Fp8Format::e4m3;
            all.push_back(wishes);
            wishes.transposed = true;
            if (codes && transposes) all.push_back(wishes);
          }
        }
      }
    }
  }
  return all;
}

Inputs random_inputs(Activation activation, int64_t rows, int64_t columns, at::ScalarType dtype,
                     bool has_bias, bool backward) {
  const int64_t width = columns * kernels::activation_inputs(activation);
  return {(torch::randn({rows, width}) * 3).to(dtype), has_bias ? torch::randn({width}).to(dtype) : Tensor(),
          backward ? torch::randn({rows, columns}).to(dtype) : Tensor()};
}

}  // namespace

TEST_CASE("on a GPU activations of every number are those of the CPU", "[gpu][activation]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : kDtypes) {
    // Of fp32 also every mantissa, of which 1 + 2^w, whose reciprocal the GPU takes step by step, has many.
    const Tensor u = dtype == at::kFloat ? at::cat({telling_floats(), at::linspace(-12, 12, 1 << 22)})
                                         : all_numbers(dtype);
    const Tensor ones = at::ones({u.numel() / 256, 256}, dtype);
    ActivationWishes wishes;
    wishes.codes = true;
    for (const bool backward : {false, true}) {
      CAPTURE(dtype, backward);
      const Tensor dy = backward ? ones : Tensor();
      compare(Activation::gelu, {u.view({-1, 256}), Tensor(), dy}, wishes);
      compare(Activation::swiglu, {at::cat({u.view({-1, 256}) * 8, ones}, 1), Tensor(), dy}, wishes);
    }
  }
}

TEST_CASE("on a GPU activations and all that is made of them have the bytes of the CPU",
          "[gpu][activation]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(1);
  const std::vector<std::pair<int64_t, int64_t>> sizes = {{16, 16},   {16, 144},  {128, 128}, {144, 112},
                                                          {64, 400},  {2048, 16}, {16, 2064}, {272, 528},
                                                          {1300, 48}, {0, 16}};
  for (const Activation activation : kActivations) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const bool backward : {false, true}) {
        for (const auto& [rows, columns] : sizes) {
          for (const ActivationWishes& wishes : all_wishes(backward, rows % 16 == 0)) {
            CAPTURE(activation == Activation::gelu, dtype, backward, rows, columns, wishes.values,
                    wishes.codes, wishes.measures, wishes.sums, wishes.scale);
            if (rows == 0 && (wishes.codes || wishes.values)) continue;  // there is no memory for them
            compare(activation, random_inputs(activation, rows, columns, dtype, columns != 112, backward),
                    wishes);
          }
        }
        for (const auto& [rows, columns] : {std::pair{1, 8}, {3, 24}, {131, 264}}) {
          for (const ActivationWishes& wishes : all_wishes(backward, false)) {
            CAPTURE(activation == Activation::gelu, dtype, backward, rows, columns);
            compare(activation, random_inputs(activation, rows, columns, dtype, true, backward), wishes);
          }
        }
      }
    }
  }
}

TEST_CASE("on a GPU rows that are not there add nothing to amax and sums", "[gpu][activation]") {
  PACER_NEEDS_GPU();
  for (const Activation activation : kActivations) {
    Inputs inputs = random_inputs(activation, 5, 16, at::kBFloat16, true, true);
    inputs.bias.fill_(std::numeric_limits<float>::infinity());
    inputs.dy.fill_(1);
    ActivationWishes wishes;
    wishes.codes = wishes.sums = true;
    compare(activation, inputs, wishes);
  }
}

TEST_CASE("on a GPU activations refuse what they cannot do", "[gpu][activation]") {
  PACER_NEEDS_GPU();
  using Catch::Matchers::ContainsSubstring;
  const auto inputs = [](int64_t rows, int64_t columns, bool backward) {
    return random_inputs(Activation::gelu, rows, columns, at::kFloat, false, backward).to_gpu();
  };
  ActivationWishes wishes;
  CHECK_THROWS_WITH(run(Activation::gelu, inputs(4, 12, false), wishes),
                    ContainsSubstring("multiple of 8, not 12"));
  CHECK_THROWS_WITH(run(Activation::gelu, inputs(4, 12, true), wishes),
                    ContainsSubstring("multiple of 8, not 12"));
  wishes.codes = wishes.transposed = true;
  CHECK_THROWS_WITH(run(Activation::gelu, inputs(24, 16, false), wishes), ContainsSubstring("24 x 16"));
  CHECK_THROWS_WITH(run(Activation::gelu, inputs(16, 24, true), wishes), ContainsSubstring("16 x 24"));
  Inputs shifted = inputs(2, 16, false);
  shifted.u = torch::randn({33}, kGpu).narrow(0, 1, 32).view({2, 16});
  CHECK_THROWS_WITH(run(Activation::gelu, shifted, {}), ContainsSubstring("multiple of 16 bytes"));
}

}  // namespace pacer::testing::kernels_activation_gpu
