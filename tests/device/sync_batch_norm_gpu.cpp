// The arithmetic of SyncBatchNorm on a GPU, over the parts of a batch one after the other, beside torch's batch norm of
// the whole batch in fp64 on the CPU; and that the host waits for none of it.
#include "support/catch.h"

#include <algorithm>
#include <vector>

#include <torch/nn/modules/batchnorm.h>

#include <pacer/modules/detail/batch_statistics.h>
#include <pacer/modules/sync_batch_norm.h>

#include "support/both_devices.h"
#include "support/no_waiting.h"

namespace pacer::testing::sync_batch_norm_gpu {
namespace {

using torch::nn::BatchNormOptions;

constexpr int64_t kChannels = 5;

// What parts of a batch have in common, and their results and gradients behind one another.
struct Pass {
  Tensor y, dx, dweight, dbias, mean, variance;
};

// Leaves x [N, C, ...] and dy; weight and bias may be undefined, and so may running statistics.
struct Case {
  Tensor x, dy, weight, bias, mean, variance;
  double momentum = 0.1, eps = 1e-5;
};

Case case_of(const std::vector<int64_t>& sizes, at::ScalarType dtype, bool is_affine, bool tracks) {
  torch::manual_seed(1);
  std::vector<int64_t> beside(sizes.size(), 1);
  beside[1] = kChannels;
  const Tensor channel = torch::arange(kChannels, torch::kDouble).view(beside);
  Case of;
  of.x = (torch::randn(sizes, torch::kDouble) * (1 + channel / 2) + channel).to(dtype);
  of.dy = (torch::randn(sizes, torch::kDouble) + 0.5).to(dtype);
  if (is_affine)
    of.weight = torch::linspace(0.5, 1.5, kChannels), of.bias = torch::linspace(-1, 1, kChannels);
  if (tracks) of.mean = torch::zeros({kChannels}), of.variance = torch::ones({kChannels});
  return of;
}

Pass reference(const Case& of) {
  torch::nn::BatchNorm2d norm(BatchNormOptions(kChannels)
                                  .eps(of.eps)
                                  .momentum(of.momentum)
                                  .affine(of.weight.defined())
                                  .track_running_stats(of.mean.defined()));
  norm->to(torch::kDouble);
  if (of.weight.defined()) {
    const torch::NoGradGuard no_grad;
    norm->weight.copy_(of.weight);
    norm->bias.copy_(of.bias);
  }
  const auto flat = [](const Tensor& t) {
    return t.to(torch::kDouble).reshape({t.size(0), kChannels, -1, 1});
  };
  const Tensor x = flat(of.x).requires_grad_();
  const Tensor y = norm(x);
  y.backward(flat(of.dy));
  Pass pass{y.detach().view(of.x.sizes()), x.grad().view(of.x.sizes()), {}, {}, {}, {}};
  if (of.weight.defined()) pass.dweight = norm->weight.grad(), pass.dbias = norm->bias.grad();
  if (of.mean.defined()) pass.mean = norm->running_mean, pass.variance = norm->running_var;
  return pass;
}

// Parts of so many rows each, in this memory order.
Pass in_parts(const Case& of, const std::vector<int64_t>& rows, at::MemoryFormat format) {
  const auto on_gpu = [](const Tensor& t) { return t.defined() ? t.to(at::kCUDA) : t; };
  const Tensor weight = on_gpu(of.weight), bias = on_gpu(of.bias);
  std::vector<Tensor> x, dy, moments, y, dx;
  std::vector<detail::BatchMoments> joined;
  int64_t first = 0;
  for (const int64_t count : rows) {
    x.push_back(on_gpu(of.x.narrow(0, first, count)).contiguous(format));
    dy.push_back(on_gpu(of.dy.narrow(0, first, count)));
    first += count;
  }
  Pass pass;
  for (const Tensor& part : x) moments.push_back(detail::part_moments(part, of.eps));
  CHECK(std::abs(detail::values_of_all(torch::stack(moments)) - of.x.numel() / kChannels) < 0.5);
  Tensor sums, dweight, dbias;
  std::vector<detail::PartSums> part_sums;
  for (size_t i = 0; i < x.size(); ++i) {
    const detail::RunningStatistics running{on_gpu(of.mean), on_gpu(of.variance), of.momentum};
    joined.push_back(detail::join_moments(torch::stack(moments), x[i], running, of.eps));
    CHECK(joined[i].mean.equal(joined[0].mean));  // to the bit, or replicas drift apart
    CHECK(joined[i].inverse.equal(joined[0].inverse));
    pass.mean = running.mean, pass.variance = running.variance;
    y.push_back(detail::normalize_part(x[i], weight, bias, joined[i], of.eps));
    CHECK(y[i].is_contiguous(format));
    CHECK(y[i].scalar_type() == of.x.scalar_type());
    const detail::PartSums part = detail::part_sums(dy[i], x[i], weight, joined[i], of.eps);
    sums = sums.defined() ? sums + part.sums : part.sums;
    if (!weight.defined()) continue;
    pass.dweight = pass.dweight.defined() ? pass.dweight + part.weight : part.weight;
    pass.dbias = pass.dbias.defined() ? pass.dbias + part.bias : part.bias;
  }
  for (size_t i = 0; i < x.size(); ++i) {
    dx.push_back(detail::input_gradient(dy[i], x[i], weight, joined[i], sums));
    CHECK(dx[i].is_contiguous(format));
  }
  pass.y = torch::cat(y), pass.dx = torch::cat(dx);
  return pass;
}

double difference(const Tensor& found, const Tensor& wanted) {
  REQUIRE(found.defined() == wanted.defined());
  return found.defined() ? (found.cpu().to(torch::kDouble) - wanted).abs().max().item<double>() : 0;
}

}  // namespace

TEST_CASE("parts of a batch on a GPU have torch's batch norm of the whole", "[sync_batch_norm][gpu]") {
  PACER_NEEDS_GPU();
  struct Type {
    at::ScalarType dtype;
    double rounding;  // the largest relative error of a number
    double exact;     // of what is computed before it is rounded
  };
  for (const Type& type : {Type{at::kFloat, 6e-8, 2e-5}, Type{at::kBFloat16, 4e-3, 2e-5},
                           Type{at::kHalf, 5e-4, 2e-5}, Type{at::kDouble, 0, 1e-12}}) {
    for (const std::vector<int64_t>& rows : {std::vector<int64_t>{4, 3}, {0, 6, 1}, {5, 0, 2}}) {
      for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{7, kChannels},
                                                {7, kChannels, 6},
                                                {7, kChannels, 4, 3},
                                                {7, kChannels, 2, 3, 2}}) {
        for (const bool is_affine : {true, false}) {
          for (const bool tracks : {true, false}) {
            Case of = case_of(sizes, type.dtype, is_affine, tracks);
            if (type.dtype == at::kDouble) {
              for (Tensor* tensor : {&of.weight, &of.bias, &of.mean, &of.variance}) {
                if (tensor->defined()) *tensor = tensor->to(at::kDouble);
              }
            }
            const auto last = sizes.size() == 4   ? at::MemoryFormat::ChannelsLast
                              : sizes.size() == 5 ? at::MemoryFormat::ChannelsLast3d
                                                  : at::MemoryFormat::Contiguous;
            for (const auto format : {at::MemoryFormat::Contiguous, last}) {
              CAPTURE(type.dtype, rows, sizes, is_affine, tracks, format);
              const Pass wanted = reference(of), found = in_parts(of, rows, format);
              // Results are at most 8.
              CHECK(difference(found.y, wanted.y) < 8 * type.rounding + type.exact);
              CHECK(difference(found.dx, wanted.dx) < 8 * type.rounding + type.exact);
              // Sums of at most 84 products of normalised values and gradients.
              CHECK(difference(found.dweight, wanted.dweight) < 20 * type.exact);
              CHECK(difference(found.dbias, wanted.dbias) < 20 * type.exact);
              CHECK(difference(found.mean, wanted.mean) < type.exact);
              CHECK(difference(found.variance, wanted.variance) < 5 * type.exact);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("the host waits for no part of a SyncBatchNorm on a GPU", "[sync_batch_norm][gpu]") {
  PACER_NEEDS_GPU();
  // Two ranks with the same rows, one of which is played here.
  struct TwinExchange : modules::StatisticsExchange {
    int ranks() const override { return 2; }
    at::Device device() const override { return at::Device("cuda:0"); }
    Tensor all_gather(const Tensor& own) override { return torch::stack({own, own}); }
    void all_reduce(const Tensor& sum) override { sum.mul_(2); }
    void leave(const std::string&) noexcept override {}
  };
  modules::SyncBatchNorm norm(kChannels);
  norm->to(at::kCUDA);
  norm->set_exchange(std::make_shared<TwinExchange>());
  torch::nn::BatchNorm2d peer(kChannels);
  peer->to(at::kCUDA);
  const Tensor x = torch::randn({8, kChannels, 3, 3}, at::kCUDA);
  const auto pass = [&](auto& layer, const Tensor& batch) {
    const Tensor leaf = batch.clone().requires_grad_();
    layer->forward(leaf).square().mul(leaf).sum().backward();
    return leaf.grad();
  };
  (void)pass(norm, x);  // what libraries set up
  norm->reset_running_stats();
  Tensor dx;
  {
    const NoWaiting no_waiting;
    dx = pass(norm, x);
  }
  const Tensor whole = pass(peer, torch::cat({x, x}));
  CHECK(dx.allclose(whole.narrow(0, 0, 8), 1e-4, 1e-4));
  CHECK(norm->running_var.allclose(peer->running_var, 1e-5, 1e-6));
}

}  // namespace pacer::testing::sync_batch_norm_gpu
