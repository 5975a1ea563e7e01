// Norms of groups and of other orders on a GPU: as in fp64 on a CPU, without waiting for the device, and replayed.
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <torch/optim/sgd.h>

#include <pacer/optimizers/detail/gradient_norms.h>
#include <pacer/pacer.h>

#include "support/both_devices.h"
#include "support/catch.h"
#include "support/hooks/four_groups.h"
#include "support/no_waiting.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::clipping_groups_gpu {
namespace {

const at::Device kGpu(at::kCUDA, 0);
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<GradientClippingOptions> clips_of(double order) {
  return {GradientClippingOptions(0.2).norm_type(order).group(1), GradientClippingOptions(0.1).group(0)};
}

// Three steps of a Session, and what the parameters are then, on the CPU in fp64.
template <class Optimizer>
std::vector<Tensor> trained(at::Device device, at::ScalarType dtype, double order, bool replays) {
  FourGroups model(dtype);
  model->to(device);
  for (Tensor& direction : model->directions) direction = direction.to(device);
  const auto options = OptionsOf<Optimizer>(0.5).momentum(0.9);
  Optimizer optimizer(groups_of<OptionsOf<Optimizer>>(*model, options), options);
  Session session(*model, optimizer);
  session.use(GradientClipping(clips_of(order)));
  if (replays) session.use(CudaGraph());
  for (int64_t i = 0; i < 5; ++i) {
    auto [x] = session.begin(torch::full({1}, 1.0 + static_cast<double>(i), dtype));
    session.backward(model->loss(x));
    session.step();
  }
  session.finish();
  std::vector<Tensor> values;
  for (const Tensor& parameter : model->parameters())
    values.push_back(parameter.detach().cpu().to(at::kDouble));
  return values;
}

}  // namespace

TEST_CASE("norms of any order on a GPU are those of fp64 on a CPU, and nothing waits",
          "[clipping][clip-groups][gpu]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(4);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    std::vector<Tensor> here, there;
    for (const int64_t size : {0, 1, 33, 70'000}) {
      there.push_back(torch::randn({size}, kGpu).to(dtype));
      here.push_back(there.back().cpu().to(at::kDouble));
    }
    for (const double order : {0.5, 1.0, 2.0, 3.0, 1000.0, kInfinity}) {
      CAPTURE(dtype, order);
      detail::gradient_norm(there, order, kGpu);  // libraries
      Tensor norm;
      {
        const NoWaiting no_waiting;
        norm = detail::gradient_norm(there, order, kGpu);
      }
      CHECK(norm.item<double>() ==
            Catch::Approx(detail::gradient_norm(here, order, at::kCPU).item<double>()).epsilon(2e-5));
    }
  }
}

TEST_CASE("groups are clipped on a GPU as on a CPU, replayed or not", "[clipping][clip-groups][gpu]") {
  PACER_NEEDS_GPU();
  for (const double order : {1.0, 2.0, 3.0, kInfinity}) {
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
      CAPTURE(order, dtype);
      const double bound = dtype == at::kDouble ? 1e-9 : 1e-4;  // values of about 50
      const std::vector<Tensor> wanted = trained<FusedSgd>(at::kCPU, dtype, order, false);
      const std::vector<Tensor> plain = trained<FusedSgd>(kGpu, dtype, order, false);
      CHECK(distance(plain, wanted) < bound);
      CHECK(same_bits(trained<FusedSgd>(kGpu, dtype, order, true), plain));
      CHECK(distance(trained<torch::optim::SGD>(kGpu, dtype, order, false), wanted) < bound);
    }
  }
}

TEST_CASE("a norm that is not finite skips a step on a GPU, and step() clips groups without waiting",
          "[clipping][clip-groups][gpu]") {
  PACER_NEEDS_GPU();
  const Tensor a = torch::ones({64}, kGpu).requires_grad_(), b = torch::ones({8}, kGpu).requires_grad_();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{a}, std::make_unique<FusedSgdOptions>(1.0));
  groups.emplace_back(std::vector<Tensor>{b}, std::make_unique<FusedSgdOptions>(1.0));
  FusedSgd optimizer(groups, FusedSgdOptions(1.0));
  a.mutable_grad() = torch::ones({64}, kGpu);
  b.mutable_grad() = torch::ones({8}, kGpu);
  optimizer.clip_group_gradient_norm(0, 1.0, 0.005);  // 64^200 is no double
  optimizer.step();
  CHECK(optimizer.skipped_steps() == 1);
  CHECK(a.eq(1).all().item<bool>());
  optimizer.clip_group_gradient_norm(0, 16.0, 1);
  optimizer.step();
  {
    const NoWaiting no_waiting;
    optimizer.step();
  }
  CHECK(optimizer.skipped_steps() == 1);
  CHECK(a.eq(0.5).all().item<bool>());  // two steps of 16 / 64
  CHECK(b.eq(-1).all().item<bool>());
}

}  // namespace pacer::testing::clipping_groups_gpu
