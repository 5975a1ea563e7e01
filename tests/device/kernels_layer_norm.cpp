// Layer normalisation on a GPU has the bytes of the CPU, at all sizes and types, and from run to run.
#include "support/catch.h"

#include <limits>

#include <torch/types.h>

#include <pacer/device/detail/stream.h>

#include "support/both_devices.h"
#include "support/kernels/layer_norm.h"

namespace pacer::testing::kernels_layer_norm_gpu {
namespace {

using kernels::Fp8Format;
using kernels::LayerNormBackward;
using kernels::LayerNormForward;

const at::Device kGpu("cuda:0");

template <class Work>
void run(const Work& work, at::Device device) {
  if (!device.is_cuda()) return run_layer_norm(work);
  if constexpr (std::is_same_v<Work, LayerNormForward>) {
    kernels::layer_norm_cuda(work, detail::current_stream(device));
  } else {
    kernels::layer_norm_backward_cuda(work, detail::current_stream(device));
  }
}

// Forward and backward, on the device of `in`.
LayerNormOutput run(const LayerNormInput& in, Fp8Format format) {
  const LayerNormOutput out = layer_norm_output(in, 3.0f);
  LayerNormForward work = forward_of(in, out);
  work.to.format = format;
  run(work, in.x.device());
  run(backward_of(in, out), in.x.device());
  return out;
}

Tensor bytes_of(const Tensor& tensor) { return tensor.cpu().contiguous().view(-1).view(at::kByte); }

void require_equal(const LayerNormOutput& found, const LayerNormOutput& wanted) {
  const std::vector<Tensor> some = found.all(), others = wanted.all();
  REQUIRE(some.size() == others.size());
  for (size_t i = 0; i < some.size(); ++i) {
    CAPTURE(i);
    REQUIRE(bytes_of(some[i]).equal(bytes_of(others[i])));
  }
}

const std::vector<std::pair<int64_t, int64_t>> kSizes = {
    {1, 8},      {3, 16},   {5, 24},     {64, 400},   {768, 1024}, {2100, 64},
    {1001, 768}, {7, 1032}, {128, 2304}, {71, 3568},  {600, 4096}, {33, 4112},
    {33, 6144},  {9, 8192}, {300, 8208}, {17, 12288}, {5, 16384},  {0, 16}};

}  // namespace

TEST_CASE("on a GPU a layer normalisation has the bytes of the CPU, forward and backward",
          "[gpu][layer_norm]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(1);
  for (const LayerNormTypes& types : kLayerNormTypes) {
    for (const auto& [rows, columns] : kSizes) {
      for (const bool has_branch : {false, true}) {
        for (const Normalization normalization : {Normalization::layer, Normalization::rms}) {
          CAPTURE(types.stream, types.branch, types.parameter, rows, columns, has_branch,
                  normalization == Normalization::rms);
          LayerNormInput in = random_layer_norm(types, rows, columns, has_branch, normalization);
          if (has_branch) in.dropout = kernels::dropout_of(0.1, 0x123456789ABCDEF);
          const Fp8Format format = has_branch ? Fp8Format::e4m3 : Fp8Format::e5m2;
          const LayerNormInput on_gpu = in.to(kGpu);
          const LayerNormOutput found = run(on_gpu, format);
          require_equal(found, run(in, format));
          require_equal(found, run(on_gpu, format));
        }
      }
    }
  }
}

TEST_CASE("on a GPU a layer normalisation makes what is wanted and no more", "[gpu][layer_norm]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(2);
  for (const LayerNormTypes& types : kLayerNormTypes) {
    for (const int64_t columns : {64, 4096}) {
      CAPTURE(types.stream, types.branch, types.parameter, columns);
      LayerNormInput in = random_layer_norm(types, 70, columns, true);
      in.dropout = kernels::dropout_of(0.3, 5);
      in.bias.reset();
      const auto both = [&](const auto& ask) {
        const LayerNormOutput wanted = ask(in), found = ask(in.to(kGpu));
        require_equal(found, wanted);
        return wanted;
      };
      // The sum alone, in place and without a bias of the branch.
      both([](LayerNormInput some) {
        some.weight.reset();
        some.branch_bias.reset();
        LayerNormOutput out;
        out.sum = some.x = some.x.clone();
        run(forward_of(some, out), some.x.device());
        return out;
      });
      // The branch alone.
      both([](const LayerNormInput& some) {
        LayerNormOutput out;
        out.sum = at::full_like(some.x, 77);
        kernels::LayerNormForward work = forward_of(some, out);
        work.weight = work.x = nullptr;
        run(work, some.x.device());
        return out;
      });
      // The amax alone, then codes by it, without y.
      both([](const LayerNormInput& some) {
        LayerNormOutput out;
        out.measured = at::zeros({1}, some.x.options().dtype(at::kInt));
        run(forward_of(some, out), some.x.device());
        out.codes = at::zeros(some.x.sizes(), some.x.options().dtype(at::kByte));
        out.inverse = at::zeros({1}, some.x.options().dtype(at::kFloat));
        run(forward_of(some, out), some.x.device());
        return out;
      });
      // A measurement beside y, and one that nobody needs.
      for (const bool is_needed : {true, false}) {
        const LayerNormOutput out = both([&](const LayerNormInput& some) {
          LayerNormOutput made = layer_norm_output(some, 1.0f);
          made.codes.reset();
          made.measured = at::zeros({1}, some.x.options().dtype(at::kInt));
          if (is_needed) made.state.reset();
          run(forward_of(some, made), some.x.device());
          return made;
        });
        CHECK((out.measured.item<int32_t>() > 0) == is_needed);
      }
      // The gradient of s in place, without those of the parameters.
      both([](const LayerNormInput& some) {
        LayerNormOutput out = layer_norm_output(some, 1.0f);
        run(forward_of(some, out), some.x.device());
        out.dx = some.dsum.clone();
        LayerNormBackward work = backward_of(some, out);
        work.dsum = work.dx;
        work.partials = work.dweight = work.dbias = nullptr;
        run(work, some.x.device());
        return out;
      });
      // Without another gradient of s.
      both([](LayerNormInput some) {
        some.dsum.reset();
        return run(some, Fp8Format::e4m3);
      });
    }
  }
}

TEST_CASE("on a GPU a row that is not finite becomes NaN alone, and 1 / scale says so", "[gpu][layer_norm]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(3);
  for (const LayerNormTypes& types : kLayerNormTypes) {
    for (const float value : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
      LayerNormInput in = random_layer_norm(types, 9, 256, false);
      in.x[4][7] = value;
      const LayerNormOutput wanted = run(in, Fp8Format::e4m3), found = run(in.to(kGpu), Fp8Format::e4m3);
      CHECK(found.y.cpu().isnan().equal(wanted.y.isnan()));
      CHECK(found.y.isnan().sum().item<int64_t>() == 256);
      CHECK(found.codes.cpu().equal(wanted.codes));
      CHECK(found.state.cpu().equal(wanted.state));
      CHECK(found.inverse.isnan().item<bool>());
    }
  }
}

TEST_CASE("on a GPU a layer normalisation refuses what it cannot do", "[gpu][layer_norm]") {
  PACER_NEEDS_GPU();
  using Catch::Matchers::ContainsSubstring;
  for (const int64_t columns : {12, 16392}) {
    const LayerNormInput in = random_layer_norm(kLayerNormTypes[0], 2, columns, false).to(kGpu);
    CHECK_THROWS_WITH(run(in, Fp8Format::e4m3),
                      ContainsSubstring("multiple of 8, at most 16384, not " + std::to_string(columns)));
  }
  LayerNormInput in = random_layer_norm(kLayerNormTypes[0], 2, 16, false).to(kGpu);
  in.x = torch::randn({33}, kGpu).narrow(0, 1, 32).view({2, 16});
  CHECK_THROWS_WITH(run(in, Fp8Format::e4m3), ContainsSubstring("multiple of 16 bytes"));
}

}  // namespace pacer::testing::kernels_layer_norm_gpu
