// Gradients of bf16 and fp16 parameters over many micro-batches: they add up in fp32 and are rounded once,
// however many ranks there are and whoever shares out the work.
#include <cmath>

#include <torch/optim/sgd.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"
#include "support/parallel/pipeline_runs.h"

namespace pacer::testing::wide_gradients {
namespace {

constexpr int64_t kSize = 640;

struct VectorImpl : torch::nn::Module {
  explicit VectorImpl(at::ScalarType dtype)
      : values(register_parameter("values", torch::zeros({kSize}, dtype))) {}
  void replace() { values = parameters_["values"] = torch::zeros_like(values).detach().requires_grad_(); }
  Tensor values;
};
TORCH_MODULE(Vector);

// Micro-gradient number k of a rank, as the parameter gets it.
using Gradient = std::function<Tensor(int64_t k)>;
Tensor ones(int64_t) { return torch::ones({kSize}); }
// 1 with noise of a half; each a number of bf16.
Tensor noisy(int64_t k) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(k));
  return (1 + torch::randn({kSize}, generator) / 2).to(at::kBFloat16).to(at::kFloat);
}

struct Run {
  int ranks = 1;
  at::ScalarType dtype = at::kBFloat16;
  int64_t micro_steps = 512;
  int64_t given = 512;  // before finish()
  bool in_fp32 = true;
  Gradient gradient = ones;
  std::function<void(Session&)> use = [](Session&) {};
};

// The mean gradient as the first moment has it, exp_avg / (1 - beta1): of the parts that rank 0 has.
Tensor mean_of(const Run& run) {
  std::vector<Vector> models;
  for (int rank = 0; rank < run.ranks; ++rank) models.emplace_back(run.dtype);
  const auto worlds = Communicator::in_process(run.ranks);
  Tensor mean;
  const auto messages = run_ranks(run.ranks, [&](int rank) {
    Vector& model = models[static_cast<size_t>(rank)];
    FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01).betas({0.5, 0.5}));
    Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
    session.use(
        GradientAccumulation(GradientAccumulationOptions(run.micro_steps).accumulate_in_fp32(run.in_fp32)));
    run.use(session);
    for (int64_t k = 0; k < run.given; ++k) {
      auto [x] = session.begin(torch::ones({1}));
      session.backward((model->values.to(at::kFloat) * run.gradient(k)).sum());
      session.step();
    }
    session.finish();
    if (rank == 0) mean = state_of(optimizer, model->values).exp_avg().to(at::kDouble).clone() * 2;
  });
  CHECK(first_of(messages) == "");
  return mean;
}

double distance_from(const Tensor& mean, double value) { return (mean - value).abs().max().item<double>(); }

struct Way {
  std::string name;
  int ranks;
  std::function<void(Session&)> use;
};
std::vector<Way> ways() {
  const auto hook = [](auto make) { return [make](Session& session) { session.use(make()); }; };
  return {
      {"alone", 1, [](Session&) {}},
      {"flat buckets", 2, [](Session&) {}},
      {"in place", 2, hook([] { return DataParallel(DataParallelOptions().in_place(true)); })},
      {"shared state", 2, hook([] { return Shards(ShardsOptions().what(Sharded::state)); })},
      {"shared gradients", 2, hook([] { return Shards(); })},
      {"clipped", 2, hook([] { return GradientClipping(1e9); })},
  };
}

}  // namespace

TEST_CASE("512 micro-gradients of 1 have the mean 1 in bf16 and fp16, whoever adds them up",
          "[session][accumulation]") {
  for (const Way& way : ways()) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      CAPTURE(way.name, dtype);
      Run run;
      run.ranks = way.ranks;
      run.use = way.use;
      run.dtype = dtype;
      CHECK(distance_from(mean_of(run), 1) == 0);
      // A window that ends early: 300 of 512.
      run.given = 300;
      CHECK(distance_from(mean_of(run), 1) == 0);
    }
  }
  Run narrow;
  narrow.in_fp32 = false;
  CHECK(distance_from(mean_of(narrow), 0.5) == 0);  // 256 + 1 is 256
}

TEST_CASE("the mean of noisy micro-gradients is rounded once", "[session][accumulation]") {
  Tensor exact = torch::zeros({kSize}, at::kDouble);
  Tensor in_fp32 = torch::zeros({kSize});
  for (int64_t k = 0; k < 512; ++k) {
    exact += noisy(k).to(at::kDouble);
    in_fp32 += noisy(k);
  }
  exact /= 512;
  const Tensor rounded = in_fp32.to(at::kBFloat16).to(at::kDouble) / 512;
  for (const Way& way : ways()) {
    CAPTURE(way.name);
    Run run;
    run.ranks = way.ranks;
    run.use = way.use;
    run.gradient = noisy;
    const Tensor mean = mean_of(run);
    const Tensor own = exact.narrow(0, 0, mean.numel());
    CHECK(mean.equal(rounded.narrow(0, 0, mean.numel())));
    CHECK(((mean - own) / own).abs().max().item<double>() <= 1.0 / 256 + 1e-5);  // half a unit of 8 bits
    CHECK(std::abs(((mean - own) / own).mean().item<double>()) < 2e-4);          // no bias
  }
}

TEST_CASE("optimizers that are not pacer's get the same mean, in the parameter's dtype",
          "[session][accumulation]") {
  Vector model(at::kBFloat16);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1.0));
  Session session(*model, optimizer);
  session.use(GradientAccumulation(512));
  for (int64_t k = 0; k < 1024; ++k) {
    auto [x] = session.begin(torch::ones({1}));
    session.backward(model->values.to(at::kFloat).sum());
    session.step();
  }
  session.finish();
  CHECK(model->values.to(at::kDouble).add(2).abs().max().item<double>() == 0);
}

TEST_CASE("a parameter that the window's last micro-step does not reach is rounded, too",
          "[session][accumulation]") {
  for (const int ranks : {1, 2}) {
    std::vector<Vector> models = {Vector(at::kBFloat16), Vector(at::kBFloat16)};
    const auto worlds = Communicator::in_process(ranks);
    const auto messages = run_ranks(ranks, [&](int rank) {
      Vector& model = models[static_cast<size_t>(rank)];
      const Tensor other = model->register_parameter("other", torch::zeros({3}));
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1.0));
      Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
      session.use(GradientAccumulation(513));
      for (int64_t k = 0; k < 513; ++k) {
        auto [x] = session.begin(torch::ones({1}));
        const Tensor loss = other.sum();
        session.backward(k < 512 ? loss + model->values.to(at::kFloat).sum() * (513.0 / 512) : loss);
        session.step();
      }
      session.finish();
    });
    CHECK(first_of(messages) == "");
    CHECK(models[0]->values.to(at::kDouble).add(1).abs().max().item<double>() < 0.01);
  }
}

TEST_CASE("a parameter that was replaced is let go, and the new one adds up in fp32, too",
          "[session][accumulation]") {
  Vector model(at::kBFloat16);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1.0));
  Session session(*model, optimizer);
  session.use(GradientAccumulation(512));
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> replaced;
  for (int window = 0; window < 3; ++window) {
    if (window > 0) {
      replaced.emplace_back(model->values.getIntrusivePtr());
      model->replace();
      optimizer.param_groups().front().params().front() = model->values;
    }
    for (int64_t k = 0; k < 512; ++k) {
      auto [x] = session.begin(torch::ones({1}));
      session.backward(model->values.to(at::kFloat).sum());
      session.step();
    }
    CHECK(distance_from(model->values.detach().to(at::kDouble), -1) == 0);
    for (const auto& tensor : replaced) CHECK(tensor.expired());
  }
  session.finish();
}

TEST_CASE("a pipeline adds up as one rank does, in fp32 and in the parameters' dtype", "[pipeline]") {
  pipelines::Setup setup;
  setup.dtype = at::kBFloat16;
  setup.micro_batches = 8;
  setup.options.accumulate_in_fp32(true);
  const pipelines::Result wide = pipelines::run_whole(setup);
  pipelines::require_same(wide, pipelines::run_piped(setup, one_f_one_b(8), 2));
  pipelines::require_same(wide, pipelines::run_piped(setup, zero_bubble(8), 2));
  setup.options.accumulate_in_fp32(false);
  const pipelines::Result narrow = pipelines::run_whole(setup);
  pipelines::require_same(narrow, pipelines::run_piped(setup, one_f_one_b(8), 2));
  CHECK(pipelines::difference(wide.gradients.front(), narrow.gradients.front()) != "");
}

TEST_CASE("training_memory counts what adds up in fp32", "[session][accumulation]") {
  const auto bytes = [](bool accumulates, std::optional<Sharded> sharded, at::ScalarType dtype) {
    return training_memory(
               TrainingMemoryOptions(1000).ranks(4).dtype(dtype).sharded(sharded).accumulates_in_fp32(
                   accumulates))
        .gradients;
  };
  CHECK(bytes(false, std::nullopt, at::kBFloat16) == 2000);
  CHECK(bytes(true, std::nullopt, at::kBFloat16) == 4000);
  CHECK(bytes(true, std::nullopt, at::kFloat) == 4000);
  CHECK(bytes(false, Sharded::gradients, at::kBFloat16) == 500);
  CHECK(bytes(true, Sharded::gradients, at::kBFloat16) == 500 + 1000);
  CHECK(bytes(true, Sharded::state, at::kBFloat16) == 4000 + 500);
}

}  // namespace pacer::testing::wide_gradients
