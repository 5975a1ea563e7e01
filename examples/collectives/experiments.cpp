// Schemes run in turn, so that a noisy minute of the machine or the network hits all of them.
#include "experiments.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <torch/utils.h>

#include <pacer/core/error.h>

#include "schemes.h"

namespace collectives {
namespace {

using at::Tensor;
using World = std::shared_ptr<pacer::Communicator>;

Tensor flat_copy(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> pieces;
  for (const Tensor& tensor : tensors) pieces.push_back(tensor.reshape({-1}));
  return at::cat(pieces);
}

// The inputs, or sums, of all ranks: [W, n].
Tensor rows_of_all(const World& world, const Tensor& own) {
  const Tensor all = at::empty({world->world_size() * own.numel()}, own.options());
  world->all_gather(all, own).wait();
  return all.view({world->world_size(), own.numel()});
}

void check_sum(const World& world, const std::string& scheme, const Tensor& sum, const Tensor& exact,
               const Tensor& bound) {
  const Tensor all = rows_of_all(world, sum);
  pacer::require<pacer::Error>(all.eq(all.select(0, 0)).all().item<bool>(), scheme,
                               " left different bits on different ranks");
  const Tensor excess = (all.select(0, 0).to(at::kDouble) - exact).abs() - bound;
  pacer::require<pacer::Error>(excess.max().item<double>() <= 0, scheme, ": element ",
                               excess.argmax().item<int64_t>(), " is further from the sum than any order of ",
                               "additions explains");
}

// Ways to train one step of `own` with an exchange behind backward.
std::vector<Way> step_ways(pacer::Communicator& world, ResidualMlp own, const Tensor& batch) {
  const auto clear = [own]() mutable { own->zero_grad(); };
  std::vector<Way> ways = {{"no exchange", clear, [own, batch]() mutable { own->loss(batch).backward(); }}};
  for (const Scheme& scheme : schemes_after_backward()) {
    ways.push_back({scheme.name, clear, [own, batch, &scheme, &world]() mutable {
                      own->loss(batch).backward();
                      auto gradients = own->gradients();
                      scheme.run(world, gradients);
                    }});
  }
  return ways;
}

// Backward is about two thirds of forward and backward.
int64_t rows_for_balance(const World& world, const std::function<Tensor(int64_t)>& batch_of,
                         const ResidualMlp& model) {
  constexpr int64_t kTrialRows = 64, kMost = 4096;
  constexpr double kBackwardShare = 2.0 / 3.0;
  auto ways = step_ways(*world, model, batch_of(kTrialRows));
  const auto timings = measure(*world, {ways.front(), ways.back()}, {1, 2, 5});  // none, one_bucket
  const double compute = timings[0].slowest, exchange = timings[1].slowest - compute;
  const double rows = kTrialRows * exchange / (kBackwardShare * compute);
  return std::clamp(static_cast<int64_t>(rows), int64_t{1}, kMost);
}

}  // namespace

void check_schemes(const World& world, const ExchangeSize& size) {
  constexpr double kUnit = 1.0 / (1 << 24);  // of fp32
  const double additions = world->world_size() - 1;
  const double gamma = additions * kUnit / (1 - additions * kUnit);

  Gradients gradients(world, size);
  // Threads share LibTorch's generators, so each rank draws from one of its own.
  const auto generator =
      at::make_generator<at::CPUGeneratorImpl>(1000 + static_cast<uint64_t>(world->rank()));
  const Tensor own = at::randn({size.elements}, generator, at::kFloat).to(world->device());
  const Tensor parts = rows_of_all(world, own).to(at::kDouble);
  const Tensor exact = parts.sum(0), bound = parts.abs().sum(0) * gamma;

  const auto fill = [&](const std::vector<Tensor>& tensors) {
    int64_t offset = 0;
    for (const Tensor& tensor : tensors) {
      tensor.copy_(own.narrow(0, offset, tensor.numel()));
      offset += tensor.numel();
    }
  };
  for (const Scheme& scheme : schemes_after_backward()) {
    fill(gradients.plain());
    scheme.run(*world, gradients.plain());
    check_sum(world, scheme.name, flat_copy(gradients.plain()), exact, bound);
  }
  fill(gradients.bucketed());
  gradients.bucketer().reduce();
  gradients.bucketer().wait();
  check_sum(world, "buckets", flat_copy(gradients.bucketed()), exact, bound);
}

std::vector<Measured> measure_exchange(const World& world, const ExchangeSize& size,
                                       const Patience& patience) {
  Gradients gradients(world, size);
  std::vector<Way> ways;
  for (const Scheme& scheme : schemes_after_backward()) {
    ways.push_back({scheme.name, [&] { gradients.reset(); }, [&] { scheme.run(*world, gradients.plain()); }});
  }
  ways.push_back({"buckets", [&] { gradients.reset(); },
                  [&] {
                    gradients.bucketer().reduce();
                    gradients.bucketer().wait();
                  }});
  const auto timings = measure(*world, ways, patience);
  std::vector<Measured> measured;
  for (size_t i = 0; i < ways.size(); ++i) measured.push_back({ways[i].name, timings[i]});
  return measured;
}

StepResults measure_step(const World& world, const StepSettings& settings, const Patience& patience) {
  // The bucketer's hooks stay on its parameters, so it gets a model of its own. Weights need not agree
  // between ranks for times.
  ResidualMlp model(settings.layers, settings.width, settings.layer_seconds),
      overlapped(settings.layers, settings.width, settings.layer_seconds);
  model->to(world->device());
  overlapped->to(world->device());
  const auto batch_of = [&](int64_t rows) {
    return at::randn({rows, settings.width}, at::TensorOptions(at::kFloat).device(world->device()));
  };

  StepResults results;
  results.rows = settings.rows;
  if (results.rows == 0) {
    constexpr int64_t kFewRows = 8;  // where layers sleep, they need not compute much
    results.rows = settings.layer_seconds > 0 ? kFewRows : rows_for_balance(world, batch_of, model);
  }
  results.elements = model->elements();
  results.tensors = static_cast<int64_t>(model->parameters().size());

  const Tensor batch = batch_of(results.rows);
  pacer::GradientBucketer bucketer(overlapped->named(), world);
  auto ways = step_ways(*world, model, batch);
  const auto clear = [&] { overlapped->zero_grad(); };
  ways.push_back({"buckets, after backward", clear, [&] {
                    overlapped->loss(batch).backward();
                    bucketer.reduce();
                    bucketer.wait();
                  }});
  ways.push_back({"bucketed_and_overlapped", clear,
                  [&] { bucketed_and_overlapped(bucketer, overlapped->loss(batch)); }});
  const auto timings = measure(*world, ways, patience);
  for (size_t i = 0; i < ways.size(); ++i) results.measurements.push_back({ways[i].name, timings[i]});
  results.buckets = bucketer.buckets_sent();
  results.buckets_early = bucketer.buckets_sent_early();
  return results;
}

}  // namespace collectives
