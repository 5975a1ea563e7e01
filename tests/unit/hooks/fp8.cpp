// Precision::fp8 in a Session: scales that move once per step, with the magnitudes of all micro-batches and
// ranks, and not by steps that are skipped, evaluations or warm-up passes.
#include "support/catch.h"

#include <limits>

#include <torch/nn/modules/container/sequential.h>

#include <pacer/modules/detail/fp8_layer.h>

#include "support/collectives/ranks.h"
#include "support/metrics/metrics_run.h"
#include "support/session/small_run.h"

namespace pacer::testing::session_fp8 {
namespace {

using NamedState = std::map<std::string, Tensor>;

RegisteredHook fp8_hook(const Fp8Options& options = {}) {
  return {"fp8", "precision", true,
          [options](Session& s, SmallModel&, EpochSampler&) { s.use(Precision::fp8(options)); }};
}
RegisteredHook hook_named(const std::string& name) {
  for (const RegisteredHook& hook : all_hooks()) {
    if (hook.name == name) return hook;
  }
  throw Error("no hook is called " + name);
}
RegisteredOptimizer adamw() { return all_optimizers().front(); }

// What the hook would save.
NamedState scales_of(const SmallRun& run) {
  NamedTensors state;
  run.parts->find<Precision>()->save(state);
  return copies_of(state);
}

void check_same(const NamedState& a, const NamedState& b) {
  REQUIRE(a.size() == b.size());
  for (const auto& [name, tensor] : a) {
    CAPTURE(name);
    CHECK(b.at(name).equal(tensor));
  }
}

bool parameters_are(SmallModel& model, const std::vector<Tensor>& values) {
  const auto now = parameters_of(model);
  for (size_t i = 0; i < now.size(); ++i) {
    if (!now[i].equal(values[i])) return false;
  }
  return true;
}
std::vector<Tensor> copied_parameters(SmallModel& model) {
  std::vector<Tensor> copies;
  for (const Tensor& parameter : parameters_of(model)) copies.push_back(parameter.detach().clone());
  return copies;
}

}  // namespace

TEST_CASE("layers compute in 8 bits between begin and backward, and nowhere else", "[session][fp8]") {
  SmallRun run(adamw(), {fp8_hook()}, /*dropout=*/0);
  const auto [ids, targets] = small_batch(0);
  const Tensor outside = run.model->forward(ids);
  Tensor inside;
  {
    auto [x, y] = run.session->begin(ids, targets);
    inside = run.model->forward(x);
    run.session->backward(run.model->loss(x, y));
  }
  run.session->step();
  CHECK(Fp8Scope::current() == nullptr);
  CHECK_FALSE(inside.to(at::kFloat).allclose(outside, 1e-3, 1e-3));
  CHECK(inside.to(at::kFloat).allclose(outside, 0.3, 0.3));
  // As Precision::bf16 without the layers.
  SmallRun bf16(adamw(), {hook_named("bf16")}, 0);
  Tensor in_bf16;
  {
    auto [x, y] = bf16.session->begin(ids, targets);
    in_bf16 = bf16.model->forward(x);
  }
  CHECK_FALSE(in_bf16.equal(inside));
  CHECK(in_bf16.scalar_type() == inside.scalar_type());
  run.finish();
}

TEST_CASE("a window's micro-steps see one scale, and their largest magnitude counts once", "[session][fp8]") {
  SmallRun run(adamw(), {fp8_hook(), hook_named("accumulation")}, 0);  // over 3
  run.step();
  const NamedState first = scales_of(run);
  const Tensor history = first.at("fp8.stack.1.input.history");
  CHECK(history.gt(0).sum().item<int64_t>() == 1);
  run.step();
  CHECK(scales_of(run).at("fp8.stack.1.input.history").gt(0).sum().item<int64_t>() == 2);
  CHECK(first.size() == 3 * 4);
}

TEST_CASE("evaluations, warm-up passes and skipped steps leave scales as they were", "[session][fp8]") {
  SmallRun run(adamw(), {fp8_hook()}, 0), twin(adamw(), {fp8_hook()}, 0);
  const auto [ids, targets] = small_batch(50);
  run.session->prewarm([&, ids = ids * 1, targets = targets] { return run.model->loss(ids, targets) * 1e3; });
  for (int step = 0; step < 4; ++step) {
    run.step();
    twin.step();
    check_same(scales_of(run), scales_of(twin));
    run.session->evaluate([&, ids = ids] { return run.model->forward(ids); });
    const auto before = copied_parameters(run.model);
    const NamedState scales = scales_of(run);
    const auto spoil = [](SmallModel& model) {
      model->blocks[1]->weight.mutable_grad().fill_(std::numeric_limits<float>::infinity());
    };
    run.step(spoil);
    twin.step(spoil);
    check_same(scales_of(run), scales);
    CHECK(parameters_are(run.model, before));
  }
  CHECK(run.session->skipped_steps() == 4);
}

TEST_CASE("an activation that is not finite skips the step and stays out of the history", "[session][fp8]") {
  for (const auto recipe : {Fp8Recipe::delayed, Fp8Recipe::current}) {
    SmallRun run(adamw(), {fp8_hook(Fp8Options().recipe(recipe))}, 0);
    run.step();
    const NamedState scales = scales_of(run);
    const auto before = copied_parameters(run.model);
    const auto [ids, targets] = small_batch(1);
    {
      auto [x, y] = run.session->begin(ids, targets);
      const Tensor huge = torch::zeros({16, kWidth});
      huge[0][0] = std::numeric_limits<float>::infinity();
      run.session->backward(run.model->loss(x, y) + run.model->blocks[0](huge).sum() * 0);
    }
    run.session->step();
    CHECK(run.session->skipped_steps() == 1);
    check_same(scales_of(run), scales);
    CHECK(parameters_are(run.model, before));
    run.step();
    CHECK(run.session->skipped_steps() == 1);
    run.finish();
  }
}

TEST_CASE("ranks share the largest magnitudes, and skip together what one of them spoils", "[session][fp8]") {
  for (const int world_size : {2, 3}) {
    std::vector<std::vector<NamedState>> scales(static_cast<size_t>(world_size));
    // Made one after the other: initial values come from the generator that all threads share.
    std::vector<std::unique_ptr<SmallRun>> runs;
    for (const auto& world : Communicator::in_process(world_size)) {
      runs.push_back(std::make_unique<SmallRun>(adamw(), std::vector<RegisteredHook>{fp8_hook()}, 0, world,
                                                /*own_random=*/false));
    }
    const auto messages = run_ranks(world_size, [&](int rank) {
      SmallRun& run = *runs[static_cast<size_t>(rank)];
      auto& own = scales[static_cast<size_t>(rank)];
      bool spoils = false;
      run.model->head->weight.register_hook([&spoils](const Tensor& gradient) {
        return spoils ? gradient * std::numeric_limits<float>::infinity() : gradient;
      });
      for (int step = 0; step < 4; ++step) {
        const auto before = copied_parameters(run.model);
        spoils = step == 2 && rank == 1;
        run.step();
        own.push_back(scales_of(run));
        if (parameters_are(run.model, before) != (step == 2))
          throw Error("a spoilt step alone changes nothing");
      }
      run.finish();
    });
    REQUIRE(first_of(messages).empty());
    for (const auto& of_rank : scales) {
      for (size_t step = 0; step < of_rank.size(); ++step) check_same(of_rank[step], scales[0][step]);
      check_same(of_rank[2], of_rank[1]);
    }
    // The input of the first layer is the same function of the first batch of all ranks as of one rank's
    // window.
    SmallRun alone(
        adamw(),
        {fp8_hook(),
         {"window", "accumulation", false,
          [&](Session& s, SmallModel&, EpochSampler&) { s.use(GradientAccumulation(world_size)); }}},
        0);
    alone.step();
    CHECK(
        scales_of(alone).at("fp8.stack.0.input.history").equal(scales[0][0].at("fp8.stack.0.input.history")));
  }
}

TEST_CASE("no 8-bit weights stay where parameters come and go", "[session][fp8][shards]") {
  for (const bool are_shared_out : {false, true}) {
    std::vector<std::unique_ptr<SmallRun>> runs;
    for (const auto& world : Communicator::in_process(2)) {
      runs.push_back(std::make_unique<SmallRun>(adamw(), std::vector<RegisteredHook>{fp8_hook()}, 0, world,
                                                /*own_random=*/false));
      if (are_shared_out) runs.back()->session->use(Shards(runs.back()->model->stack));
    }
    const auto messages = run_ranks(2, [&](int rank) {
      SmallRun& run = *runs[static_cast<size_t>(rank)];
      for (int step = 0; step < 3; ++step) {
        const auto batch = run.next_batch();
        auto [x, y] = run.session->begin(batch.first, batch.second);
        const Tensor loss = run.model->loss(x, y);
        const auto layer = Fp8Scope::current()->layer_of(*run.model->blocks[1]);
        RANK_REQUIRE(layer && layer->holds_weight() == !are_shared_out);
        run.session->backward(loss);
        RANK_REQUIRE(layer->holds_weight() == !are_shared_out);
        run.session->step();
      }
      run.finish();
    });
    CHECK(first_of(messages) == "");
  }
}

TEST_CASE("recomputed layers see the scales and drop the elements of their first pass",
          "[session][fp8][fused]") {
  for (const bool are_fused : {false, true}) {
    for (const auto recipe : {Fp8Recipe::delayed, Fp8Recipe::current}) {
      CAPTURE(are_fused, recipe == Fp8Recipe::delayed);
      std::vector<RegisteredHook> hooks = {fp8_hook(Fp8Options().recipe(recipe)), hook_named("accumulation")};
      if (are_fused) hooks.push_back(hook_named("fused layers"));
      SmallRun plain(adamw(), hooks, /*dropout=*/0.1);
      hooks.push_back(hook_named("recompute"));
      SmallRun recomputed(adamw(), hooks, 0.1);
      for (int step = 0; step < 4; ++step) {
        plain.step();
        recomputed.step();
        REQUIRE(first_difference(plain.state().model, recomputed.state().model) == "");
        check_same(scales_of(plain), scales_of(recomputed));
      }
    }
  }
}

TEST_CASE("Metrics count calls in 16 bits", "[session][fp8]") {
  const TemporaryFolder folder;
  SmallRun run(adamw(), {fp8_hook()}, 0);
  run.session->use(Metrics(folder.path()));
  run.step();
  {
    auto [x, y] = run.session->begin(small_batch(1, 1, 15).first, small_batch(1, 1, 15).second);
    run.session->backward(run.model->loss(x, y));
  }
  run.session->step();
  run.finish();
  const auto lines = metrics_lines(folder);
  REQUIRE(lines.size() == 2);
  CHECK(lines[0]["calls_in_16_bits"] == 0);
  CHECK(lines[1]["calls_in_16_bits"] == 3);
}

TEST_CASE("Precision::fp8 is refused where it can do nothing", "[session][fp8]") {
  torch::nn::Sequential plain(torch::nn::Linear(16, 16));
  FusedAdamW optimizer(plain->parameters());
  Session session(*plain, optimizer);
  CHECK_THROWS_WITH(session.use(Precision::fp8()),
                    Catch::Matchers::ContainsSubstring("no pacer::modules::Linear"));
  session.use(Precision::bf16());
}

}  // namespace pacer::testing::session_fp8
