// The Session on a GPU: nothing waits for the device, a replayed optimizer does what an enqueued one does,
// skipped steps change nothing, and resume goes on to the bit.
#include <cmath>

#include <pacer/session/detail/step_graph.h>

#include "support/both_devices.h"
#include "support/catch.h"
#include "support/no_waiting.h"
#include "support/optimizers/contract.h"
#include "support/session/hook_pairs.h"
#include "support/session/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

const at::Device kGpu(at::kCUDA, 0);

std::vector<RegisteredHook> hooks_named(const std::vector<std::string>& names) {
  std::vector<RegisteredHook> chosen;
  for (const RegisteredHook& hook : all_hooks()) {
    if (std::find(names.begin(), names.end(), hook.name) != names.end()) chosen.push_back(hook);
  }
  return chosen;
}

RegisteredHook cuda_graph() {
  return {"cuda graph", "cuda graph", false,
          [](Session& s, SmallModel&, EpochSampler&) { s.use(pacer::CudaGraph()); }};
}

// Sets of hooks that between them have everything.
std::vector<std::vector<RegisteredHook>> hook_sets() {
  return {{},
          hooks_named({"learning rate"}),
          hooks_named({"clipping", "learning rate", "accumulation"}),
          hooks_named({"bf16", "layer drop", "curriculum", "clipping", "sampler"}),
          hooks_named({"bf16", "layer drop by sample", "recompute", "accumulation"}),
          hooks_named({"average of weights", "vary", "clipping", "learning rate"}),
          hooks_named({"clipping of a group by another norm", "learning rate", "accumulation"}),
          hooks_named({"fp16", "clipping of a group by another norm"}),
          hooks_named({"fp8", "layer drop", "recompute", "curriculum by reshape", "accumulation"}),
          hooks_named(
              {"fp16", "accumulation by tokens", "layer drop", "curriculum by reshape", "learning rate"})};
}

}  // namespace

TEST_CASE("a step never waits for the GPU", "[session][gpu]") {
  PACER_NEEDS_GPU();
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    if (!optimizer.is_own) continue;
    for (auto hooks : hook_sets()) {
      for (const bool replay : {false, true}) {
        if (replay && optimizer.has_ranks) continue;
        if (replay) hooks.push_back(cuda_graph());
        INFO(optimizer.name << ": " << names_of(hooks));
        SmallRun run(optimizer, hooks, 0.1, kGpu);
        for (int step = 0; step < 3; ++step) run.step();  // state, tables, libraries
        const NoWaiting no_waiting;
        for (int micro_step = 0; micro_step < 12; ++micro_step) {
          const auto batch = run.next_batch();
          auto [x, y] = run.session->begin(batch.first, batch.second);
          run.session->backward(run.model->loss(x, y));
          run.session->step();
        }
        CHECK_THROWS(torch::ones({1}, kGpu).item<float>());  // the check itself works
      }
    }
  }
}

TEST_CASE("a replayed optimizer does what an enqueued one does, to the bit", "[session][gpu]") {
  PACER_NEEDS_GPU();
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    if (!optimizer.is_own || optimizer.has_ranks) continue;
    for (const auto& hooks : hook_sets()) {
      INFO(optimizer.name << ": " << names_of(hooks));
      auto with_graph = hooks;
      with_graph.push_back(cuda_graph());
      SmallRun plain(optimizer, hooks, 0.1, kGpu), replayed(optimizer, with_graph, 0.1, kGpu);
      for (int step = 0; step < 12; ++step) {
        const auto spoil = [&](SmallModel& model) {
          if (step % 5 == 3) model->head->bias.mutable_grad()[0] = std::nan("");
        };
        plain.step(spoil);
        replayed.step(spoil);
        if (step == 7) {  // an option and a parameter change between steps
          for (SmallRun* run : {&plain, &replayed}) {
            const torch::NoGradGuard no_grad;
            run->model->head->weight.mul_(0.5);
            run->optimizer->param_groups()[1].options().set_lr(0.02);
          }
          if (plain.parts->find<LearningRate>() != nullptr) break;  // refuses other hands on its rate
        }
        REQUIRE(first_difference(plain.state(), replayed.state()) == "");
      }
      CHECK(plain.session->skipped_steps() == replayed.session->skipped_steps());
      CHECK(plain.session->skipped_steps() > 0);
    }
  }
}

TEST_CASE("after two steps every step is a replay, until the parameters change", "[session][gpu]") {
  PACER_NEEDS_GPU();
  auto model = small_model();
  model->to(kGpu);
  FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01));
  const auto guard = std::make_shared<GradientGuard>(kGpu);
  guard->clip_to(0.1);
  detail::StepGraph graph;
  const auto step = [&](int64_t number) {
    const auto batch = small_batch(number);
    model->loss(batch.first.to(kGpu), batch.second.to(kGpu)).backward();
    optimizer.param_groups()[0].options().set_lr(0.01 / static_cast<double>(number + 1));
    StepInputs inputs;
    inputs.guard = guard;
    inputs.replayable = true;
    contract(optimizer).prepare(inputs);
    contract(optimizer).conclude(graph.enqueue(optimizer, kGpu));
    optimizer.zero_grad();
  };
  for (int64_t number = 0; number < 8; ++number) {
    step(number);
    CHECK(graph.replays() == std::max<int64_t>(0, number));
  }
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({torch::ones({3}, kGpu).requires_grad_()}));
  optimizer.param_groups()[1].params()[0].mutable_grad() = torch::ones({3}, kGpu);
  step(8);
  CHECK(graph.replays() == 7);
  step(9);  // the new parameter has no gradient and sits out, which only changes a table
  CHECK(graph.replays() == 8);
  step(10);
  CHECK(graph.replays() == 9);
}

TEST_CASE(
    "a weight of the step that changes, or a gradient in another memory order, is no reason not to replay",
    "[session][gpu]") {
  PACER_NEEDS_GPU();
  for (const bool has_guard : {false, true}) {
    CAPTURE(has_guard);
    torch::manual_seed(3);
    const std::vector<Tensor> plain = {torch::randn({6, 5}, kGpu).requires_grad_(),
                                       torch::randn({7}, kGpu).requires_grad_()};
    const std::vector<Tensor> replayed = clones(plain);
    FusedAdamW eager(plain, FusedAdamWOptions(0.01)), captured(replayed, FusedAdamWOptions(0.01));
    detail::StepGraph graph;
    const auto guard_of = [&]() -> std::shared_ptr<GradientGuard> {
      if (!has_guard) return nullptr;
      const auto guard = std::make_shared<GradientGuard>(kGpu);
      guard->clip_to(0.3);
      return guard;
    };
    const auto first = guard_of(), second = guard_of();
    for (int64_t number = 0; number < 8; ++number) {
      StepInputs inputs;
      inputs.average = 1.0 / static_cast<double>(number + 1);
      for (size_t i = 0; i < plain.size(); ++i) {
        const Tensor gradient = torch::randn(plain[i].sizes(), kGpu);
        plain[i].mutable_grad() = gradient.clone();
        // Each step at another address.
        replayed[i].mutable_grad() = i == 0 ? gradient.t().contiguous().t() : gradient.clone();
      }
      inputs.guard = first;
      contract(eager).prepare(inputs);
      contract(eager).conclude(contract(eager).enqueue());
      inputs.guard = second;
      inputs.replayable = true;
      contract(captured).prepare(inputs);
      contract(captured).conclude(graph.enqueue(captured, kGpu));
      CHECK(graph.replays() == number);
      CHECK(same_bits(plain, replayed));
    }
  }
}

TEST_CASE("CudaGraph is refused where it cannot work", "[session][gpu]") {
  PACER_NEEDS_GPU();
  auto model = small_model();
  torch::optim::SGD on_cpu(model->parameters(), 0.1);
  CHECK(contains(refusal([&] { Session(*model, on_cpu).use(pacer::CudaGraph()); }), "GPU"));
  model->to(kGpu);
  torch::optim::SGD foreign(model->parameters(), 0.1);
  CHECK(contains(refusal([&] { Session(*model, foreign).use(pacer::CudaGraph()); }), "FusedAdamW"));
}

TEST_CASE("on a GPU, non-finite gradients change nothing but the attempt", "[session][gpu]") {
  PACER_NEEDS_GPU();
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    for (const auto& hooks : hook_sets()) {
      const bool guarded = std::any_of(hooks.begin(), hooks.end(), [](const auto& h) { return h.has_guard; });
      if (!optimizer.is_own && !guarded) continue;
      for (const double bad : {std::nan(""), double(INFINITY)}) {
        INFO(optimizer.name << ": " << names_of(hooks));
        const bool moves = contains(names_of(hooks), "vary");
        SmallRun run(optimizer, hooks, 0.1, kGpu);
        for (int step = 0; step < 2; ++step) run.step();
        const auto before = run.state();
        run.step([&](SmallModel& model) { model->head->bias.mutable_grad()[kVocabulary - 1] = bad; });
        const auto after = run.state();
        CHECK(first_difference(before.model, after.model) == "");
        for (const auto& [name, tensor] : before.optimizer) {
          const bool is_rate = contains(name, "/lr") && !contains(name, "/lr_max");
          if (is_rate || contains(name, "attempts")) continue;
          // A number goes on moving, and an average takes the weights as they are once more.
          if (moves && (contains(name, "/weight_decay") || contains(name, "/hook."))) continue;
          CHECK(same_bits(tensor.cpu(), after.optimizer.at(name).cpu()));
        }
        CHECK(run.session->skipped_steps() == 1);
        run.step();
        CHECK(first_difference(after.model, run.state().model) != "");
      }
    }
  }
}

TEST_CASE("R1: on a GPU, a resumed run goes on to the bit", "[session][resume][gpu]") {
  PACER_NEEDS_GPU();
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    for (const auto& hooks : hook_sets()) {
      INFO(optimizer.name << ": " << names_of(hooks));
      const TemporaryFolder folder;
      SmallRun whole(optimizer, hooks, 0.1, kGpu);
      whole.session->use(Checkpoints(CheckpointsOptions(folder.path()).every(4).synchronous(true)));
      for (int step = 0; step < 4; ++step) whole.step();
      SmallRun resumed(optimizer, hooks, 0.1, kGpu), cold(optimizer, hooks, 0.1, kGpu);
      resumed.session->use(Checkpoints(CheckpointsOptions(folder.path()).every(100)));
      REQUIRE(resumed.resume() == 4);
      REQUIRE(first_difference(whole.state(), resumed.state()) == "");
      for (int step = 4; step < 7; ++step) {
        whole.step();
        resumed.step();
        cold.step();
        REQUIRE(first_difference(whole.state(), resumed.state()) == "");
      }
      CHECK(first_difference(whole.state().model, cold.state().model) != "");
    }
  }
}

TEST_CASE("a checkpoint of a GPU loads on the CPU", "[session][resume][gpu]") {
  PACER_NEEDS_GPU();
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    INFO(optimizer.name);
    SmallRun on_gpu(optimizer, {}, 0.0, kGpu), on_cpu(optimizer, {}, 0.0);
    for (int step = 0; step < 3; ++step) on_gpu.step();
    auto state = on_gpu.state();
    state.session.erase("random/cuda");
    on_cpu.load(state);
    const auto loaded = on_cpu.state();
    CHECK(first_difference(loaded.model, state.model) == "");
    CHECK(first_difference(loaded.optimizer, state.optimizer) == "");
    on_cpu.step();
  }
}

}  // namespace pacer::testing
