// Norms and rotations of heads on a GPU have the bytes of the CPU, at all sizes and types, and from run to run.
#include "support/catch.h"

#include <pacer/device/detail/stream.h>

#include "support/both_devices.h"
#include "support/kernels/rotary.h"

namespace pacer::testing::kernels_rotary_gpu {
namespace {

const at::Device kGpu("cuda:0");

RotaryOutput run(const RotaryInput& in) {
  return both_ways(in, [&](const auto& work) {
    if (!in.qkv.is_cuda()) return run_rotary(work);
    if constexpr (std::is_same_v<std::decay_t<decltype(work)>, kernels::RotaryForward>) {
      kernels::rotary_cuda(work, detail::current_stream(in.qkv.device()));
    } else {
      kernels::rotary_backward_cuda(work, detail::current_stream(in.qkv.device()));
    }
  });
}

Tensor bytes_of(const Tensor& tensor) { return tensor.cpu().contiguous().view(-1).view(at::kByte); }

void require_equal(const RotaryOutput& found, const RotaryOutput& wanted) {
  const std::vector<Tensor> some = found.all(), others = wanted.all();
  REQUIRE(some.size() == others.size());
  for (size_t i = 0; i < some.size(); ++i) {
    CAPTURE(i);
    REQUIRE(bytes_of(some[i]).equal(bytes_of(others[i])));
  }
}

const std::vector<RotaryShape> kShapes = {{1, 1, 1, 1, 16},   {2, 3, 4, 2, 32},  {3, 65, 12, 12, 64},
                                          {2, 100, 5, 1, 80}, {1, 33, 3, 3, 96}, {2, 700, 8, 2, 128},
                                          {1, 17, 4, 1, 256}, {1, 5, 2, 1, 512}, {0, 16, 2, 1, 64}};

}  // namespace

TEST_CASE("on a GPU heads are normalised and turned with the bytes of the CPU, forward and backward",
          "[gpu][rotary]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(1);
  for (const RotaryTypes& types : kRotaryTypes) {
    for (const RotaryShape& shape : kShapes) {
      for (const bool is_rotated : {true, false}) {
        for (const bool has_norms : {true, false}) {
          CAPTURE(types.heads, types.parameter, shape.rows(), shape.head_dim, is_rotated, has_norms);
          const RotaryInput in = random_rotary(types, shape, is_rotated, has_norms), on_gpu = in.to(kGpu);
          const RotaryOutput found = run(on_gpu);
          require_equal(found, run(in));
          require_equal(found, run(on_gpu));
        }
      }
    }
  }
}

TEST_CASE("on a GPU heads are turned in place", "[gpu][rotary]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(2);
  const RotaryInput in = random_rotary(kRotaryTypes[1], {2, 300, 8, 2, 128}, true, false).to(kGpu);
  const RotaryOutput out = run(in);
  kernels::rotary_cuda(rotary_forward_of(in, in.qkv), detail::current_stream(kGpu));
  CHECK(in.qkv.narrow(1, 0, out.qk.size(1)).equal(out.qk));
}

TEST_CASE("on a GPU a rotation of heads refuses what it cannot do", "[gpu][rotary][errors]") {
  PACER_NEEDS_GPU();
  using Catch::Matchers::ContainsSubstring;
  const RotaryInput narrow = random_rotary(kRotaryTypes[1], {1, 2, 2, 1, 8}, true, false).to(kGpu);
  CHECK_THROWS_WITH(run(narrow), ContainsSubstring("multiple of 16, not 8"));
  RotaryInput in = random_rotary(kRotaryTypes[1], {1, 2, 2, 1, 16}, true, false).to(kGpu);
  kernels::RotaryForward work = rotary_forward_of(in, in.qkv);
  work.q.from_stride = 68;
  CHECK_THROWS_WITH(kernels::rotary_cuda(work, detail::current_stream(kGpu)),
                    ContainsSubstring("multiples of 8 elements, not 68"));
  in.qkv = torch::randn({129}, kGpu).to(at::kBFloat16).narrow(0, 1, 128).view({2, 64});
  CHECK_THROWS_WITH(run(in), ContainsSubstring("multiple of 16 bytes"));
}

}  // namespace pacer::testing::kernels_rotary_gpu
