// Adapters and weights in 4 bits in a Session: with every hook, with ranks, shards and checkpoints they train
// as other parameters do, and what is frozen is neither sent nor counted nor changed.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include <pacer/checkpoints/detail/checkpoint_files.h>
#include <pacer/parallel/shards.h>

#include "support/catch.h"
#include "support/message_of.h"
#include "support/parallel/shard_reference.h"
#include "support/parallel/shard_runs.h"
#include "support/session/hook_pairs.h"
#include "support/session/mistakes.h"
#include "support/temporary_folder.h"

namespace pacer::testing::lora_session {
namespace {

using shards::on_all;
using shards::Runs;
using shards::runs_of;
using shards::step_all;

// A model with adapters, and another hook.
struct Pair {
  std::vector<RegisteredHook> hooks;
  std::string name;
  bool is_mixed;  // 16 and 32 bits in one model
};
std::vector<Pair> adapted_with_hooks() {
  std::vector<Pair> pairs;
  for (const RegisteredHook& model : adapted_models()) {
    const bool is_mixed = model.name.find("bf16") != std::string::npos;
    pairs.push_back({{model}, model.name, is_mixed});
    for (const RegisteredHook& hook : all_hooks()) {
      if (hook.kind != "layers") pairs.push_back({{model, hook}, names_of({model, hook}), is_mixed});
    }
  }
  return pairs;
}

RegisteredHook four_bits() { return adapted_models()[1]; }

RegisteredOptimizer optimizer_called(const std::string& name) {
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    if (optimizer.name == name) return optimizer;
  }
  throw Error("no optimizer is called " + name);
}

bool is_in(const std::vector<RegisteredHook>& hooks, const std::string& kind) {
  return std::any_of(hooks.begin(), hooks.end(), [&](const auto& hook) { return hook.kind == kind; });
}

// All that is not trained: frozen parameters, codes, scales.
NamedTensors frozen_of(SmallModel& model) {
  NamedTensors frozen;
  for (const auto& item : model->named_parameters()) {
    if (!item.value().requires_grad()) frozen[item.key()] = item.value().detach().clone();
  }
  for (const auto& item : model->named_buffers()) frozen[item.key()] = item.value().clone();
  return frozen;
}

}  // namespace

TEST_CASE("with every hook adapters train, are resumed to the bit and keep all else as it was",
          "[lora][session]") {
  const auto optimizers = all_optimizers();
  size_t next = 0;
  for (const Pair& pair : adapted_with_hooks()) {
    // Groups of both 16 and 32 bits are for some optimizers only.
    const RegisteredOptimizer optimizer =
        pair.is_mixed ? optimizer_called("FusedAdamW") : optimizers[next++ % optimizers.size()];
    INFO(optimizer.name << ", " << pair.name);
    SmallRun run(optimizer, pair.hooks), reversed(optimizer, {pair.hooks.rbegin(), pair.hooks.rend()});
    SmallRun resumed(optimizer, pair.hooks);
    const NamedTensors frozen = frozen_of(run.model);
    REQUIRE(run.model->named_parameters().size() == frozen.size() + 7 - run.model->named_buffers().size());
    const NamedTensors first = run.state().model;
    for (int step = 0; step < 3; ++step) {
      run.step();
      reversed.step();
      REQUIRE(std::isfinite(run.loss));
    }
    REQUIRE(first_difference(run.state(), reversed.state()) == "");
    resumed.step();
    resumed.load(run.state());
    REQUIRE(first_difference(run.state(), resumed.state()) == "");
    for (int step = 0; step < 3; ++step) {
      run.step();
      resumed.step();
      REQUIRE(first_difference(run.state(), resumed.state()) == "");
    }
    REQUIRE(first_difference(frozen_of(run.model), frozen) == "");
    const NamedTensors last = run.state().model;
    for (const auto& item : modules::trainable(*run.model)) {
      REQUIRE_FALSE(same_bits(last.at(item.key()), first.at(item.key())));
    }
  }
}

TEST_CASE("a gradient of an adapter that is not finite changes nothing but the attempt", "[lora][session]") {
  for (const Pair& pair : adapted_with_hooks()) {
    INFO(pair.name);
    SmallRun run(optimizer_called("FusedAdamW"), pair.hooks);
    for (int step = 0; step < 2; ++step) run.step();
    const auto before = run.state();
    run.step([](SmallModel& model) {
      Tensor& gradient = model->blocks[2]->adapter("default")->A.mutable_grad();
      if (!gradient.defined()) gradient = torch::zeros_like(model->blocks[2]->adapter("default")->A);
      gradient[2][kWidth - 1] = -INFINITY;
    });
    REQUIRE(run.session->skipped_steps() == 1);
    REQUIRE(first_difference(before.model, run.state().model) == "");
    run.step();
    REQUIRE(first_difference(before.model, run.state().model) != "");
  }
}

TEST_CASE("with every hook, ranks with adapters equal one process that takes the shards in rank order",
          "[lora][session][data_parallel]") {
  int world_size = 2;
  size_t next = 0;
  for (const Pair& pair : adapted_with_hooks()) {
    if (differ_by_rank(pair.hooks)) continue;
    world_size = 5 - world_size;
    const char* names[] = {"FusedAdamW", "FusedLamb", "SGD", "FusedAdamW bf16 remainder"};
    const RegisteredOptimizer optimizer = optimizer_called(pair.is_mixed ? names[0] : names[next++ % 4]);
    INFO(optimizer.name << ", " << pair.name << ", " << world_size << " ranks");
    Runs runs = runs_of(optimizer, pair.hooks, world_size, shards::data_parallel);
    SmallRun reference(optimizer, pair.hooks, /*dropout=*/0, Communicator::alone(at::kCPU), false);
    reference.shards = world_size;
    reference.session->use(std::make_shared<ShardReference>(reference.model, world_size));
    for (int step = 0; step < 4; ++step) {
      REQUIRE(step_all(runs) == "");
      reference.step();
      REQUIRE(replica_difference(*runs[0], reference) == "");
      for (auto& run : runs) REQUIRE(replica_difference(*runs[0], *run) == "");
    }
  }
}

TEST_CASE("with every hook, Shards trains adapters as DataParallel, to the bit",
          "[lora][shards][session][data_parallel]") {
  const auto optimizers = shards::shared_optimizers();
  int world_size = 2;
  size_t next = 0;
  for (const Pair& pair : adapted_with_hooks()) {
    const bool accumulates = is_in(pair.hooks, "accumulation");
    world_size = 5 - world_size;
    const RegisteredOptimizer optimizer =
        pair.is_mixed ? optimizer_called("FusedAdamW") : optimizers[next++ % optimizers.size()];
    Runs wanted = runs_of(optimizer, pair.hooks, world_size, shards::data_parallel);
    std::vector<NamedTensors> models;
    for (int step = 0; step < 3; ++step) {
      REQUIRE(step_all(wanted) == "");
      models.push_back(shards::models_of(wanted).front());
    }
    // State and gradients take turns; in a long run every hook has all three.
    const Sharded left_out = next / 2 % 2 == 0 ? Sharded::state : Sharded::gradients;
    for (const Sharded what : {Sharded::state, Sharded::gradients, Sharded::parameters}) {
      if (what == left_out && !wants_long_tests()) continue;
      // Added over ranks in every micro-step, gradients add up in another order.
      if (what == Sharded::gradients && accumulates) continue;
      INFO(optimizer.name << ", " << pair.name << ", " << world_size << " ranks, " << shards::name_of(what));
      Runs found = runs_of(optimizer, pair.hooks, world_size, [&](SmallRun& run) {
        if (what != Sharded::parameters) return shards::sharded(what)(run);
        run.session->use(Shards(run.model->stack, ShardsOptions().reduce_every_micro_step(!accumulates)));
      });
      for (const NamedTensors& model : models) {
        REQUIRE(step_all(found) == "");
        for (const NamedTensors& other : shards::models_of(found)) {
          // Gradients of a block's argument, which the gate uses, too, add up in another order where the
          // block has frozen parameters that come and go.
          if (what == Sharded::parameters && is_in(pair.hooks, "layer drop")) {
            for (const auto& [name, tensor] : model) REQUIRE(tensor.allclose(other.at(name), 1e-2, 1e-3));
          } else {
            REQUIRE(first_difference(model, other) == "");
          }
        }
      }
    }
  }
}

TEST_CASE("every optimizer trains adapters on ranks, and replicas stay identical",
          "[lora][session][data_parallel]") {
  auto hooks = shards::hooks_named({"accumulation", "clipping", "layer drop", "sampler"});
  hooks.push_back(four_bits());
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    INFO(optimizer.name);
    Runs runs = runs_of(optimizer, hooks, 3, shards::data_parallel);
    const NamedTensors frozen = frozen_of(runs[0]->model);
    for (int step = 0; step < 4; ++step) {
      REQUIRE(step_all(runs) == "");
      for (auto& run : runs) REQUIRE(replica_difference(*runs[0], *run) == "");
    }
    for (auto& run : runs) REQUIRE(first_difference(frozen_of(run->model), frozen) == "");
  }
}

TEST_CASE("ranks send gradients of adapters only, and the norm is theirs", "[lora][session][data_parallel]") {
  const RegisteredOptimizer optimizer = optimizer_called("FusedAdamW");
  auto hooks = shards::hooks_named({"clipping"});
  hooks.push_back(four_bits());
  Runs runs = runs_of(optimizer, hooks, 2, [](SmallRun& run) {
    run.session->use(DataParallel());  // one bucket
  });
  REQUIRE(step_all(runs) == "");
  const Traffic before = traffic_of(*runs[0]->world, "all_reduce");
  REQUIRE(step_all(runs) == "");
  int64_t trained = 0;
  for (const auto& item : modules::trainable(*runs[0]->model)) trained += item.value().numel();
  REQUIRE(trained == 3 * 2 * 3 * kWidth + kVocabulary);
  // Of two ranks each sends all elements of the sum once, of each of the 7 tensors whole tiles of 128.
  const int64_t sent = traffic_of(*runs[0]->world, "all_reduce").bytes_sent - before.bytes_sent;
  CHECK(sent == 4 * 7 * 128);
  for (const auto& item : runs[0]->model->named_parameters()) {
    CHECK((item.value().requires_grad() || !item.value().grad().defined()));
  }

  SmallRun run(optimizer, hooks);
  double squares = 0;
  run.step([&](SmallModel& model) {
    for (const auto& item : modules::trainable(*model)) {
      squares += item.value().grad().to(at::kDouble).square().sum().item<double>();
    }
  });
  CHECK(run.session->gradient_norm() == Catch::Approx(std::sqrt(squares)).epsilon(1e-6));
}

TEST_CASE("a recomputed block with adapters trains as one that is not, to the bit, dropout included",
          "[lora][session][recompute]") {
  for (const RegisteredHook& model : adapted_models()) {
    INFO(model.name);
    auto hooks = shards::hooks_named({"recompute"});
    hooks.push_back(model);
    SmallRun plain(optimizer_called("FusedAdamW"), {model}, 0.25);
    SmallRun again(optimizer_called("FusedAdamW"), hooks, 0.25);
    SmallRun other(optimizer_called("FusedAdamW"), {model}, 0.25);
    other.seed(18);
    for (int step = 0; step < 4; ++step) {
      plain.step();
      again.step();
      other.step();
      REQUIRE(first_difference(plain.state().model, again.state().model) == "");
    }
    REQUIRE(first_difference(plain.state().model, other.state().model) != "");
  }
}

TEST_CASE("adapters of a block that was dropped get gradients of zero, and its frozen weights none",
          "[lora][session]") {
  struct Probe : Hook {
    explicit Probe(SmallModel of) : model(std::move(of)) {}
    std::string hook_name() const override { return "zero_probe"; }
    Slot slot() const override { return Slot::clip; }
    void attach(SessionParts& of) override { parts = &of; }
    void gradients_ready(const Progress& window) override {
      const auto unused = parts->unused(window);
      for (const auto& layer : model->blocks) {
        const modules::LoraAdapter adapter = layer->adapter("default");
        const bool is_dropped = std::any_of(unused.begin(), unused.end(),
                                            [&](const Tensor& one) { return one.is_same(adapter->A); });
        for (const Tensor& part : {adapter->A, adapter->B}) {
          require(part.grad().defined(), "an adapter has no gradient");
          require((part.grad().count_nonzero().item<int64_t>() == 0) == is_dropped, "another gradient");
        }
        require(!layer->bias.grad().defined(), "a frozen bias has a gradient");
        dropped += is_dropped;
      }
    }
    SmallModel model;
    SessionParts* parts = nullptr;
    int64_t dropped = 0;
  };
  auto hooks = shards::hooks_named({"layer drop"});
  hooks.push_back(four_bits());
  SmallRun run(optimizer_called("FusedAdamW"), hooks);
  const auto probe = std::make_shared<Probe>(run.model);
  run.session->use(probe);
  for (int step = 0; step < 10; ++step) run.step();
  CHECK(probe->dropped > 2);
  CHECK(probe->dropped < 28);
}

TEST_CASE("checkpoints of adapters over 4 bits, of any number of ranks, are resumed by any other",
          "[lora][session][resume][ranks]") {
  auto hooks = shards::hooks_named({"clipping", "learning rate", "sampler"});
  hooks.push_back(four_bits());
  for (const bool saves_frozen : {true, false}) {
    const auto runs_in = [&](const std::string& folder, int world_size, const shards::Adds& way) {
      return runs_of(optimizer_called("FusedAdamW"), hooks, world_size, [&, way](SmallRun& run) {
        if (world_size > 1) way(run);
        run.session->use(Checkpoints(
            CheckpointsOptions(folder).every(2).keep(9).synchronous(true).save_frozen(saves_frozen)));
      });
    };
    for (const int before : {1, 2, 3}) {
      const auto saves = before == 2 ? shards::sharded(saves_frozen ? Sharded::parameters : Sharded::state)
                                     : shards::Adds(shards::data_parallel);
      const TemporaryFolder folder;
      Runs saved = runs_in(folder.path(), before, saves);
      for (int step = 0; step < 2; ++step) REQUIRE(step_all(saved) == "");
      REQUIRE(on_all(saved, [](SmallRun& run) { run.finish(); }) == "");
      saved.clear();
      for (const int after : {3, 1, 2}) {
        INFO("from " << before << " to " << after << (saves_frozen ? "" : " without frozen weights"));
        const TemporaryFolder a, b;
        for (const TemporaryFolder* copy : {&a, &b}) {
          std::filesystem::copy(folder.path(), copy->path(), std::filesystem::copy_options::recursive);
        }
        Runs wanted = runs_in(a.path(), after, shards::data_parallel);
        Runs found = runs_in(b.path(), after,
                             shards::sharded(saves_frozen ? Sharded::parameters : Sharded::gradients));
        for (Runs* runs : {&wanted, &found}) {
          // What the file has must come from there.
          for (auto& run : *runs) {
            run->model->blocks[0]->adapter("default")->A.detach().zero_();
            if (saves_frozen) run->model->blocks[0]->nf4()->codes.zero_();
          }
          const CapturedStderr quiet;
          REQUIRE(on_all(*runs, [](SmallRun& run) {
                    require(run.session->resume() == 2, "nothing was resumed");
                    run.sampler.reset();
                  }) == "");
        }
        for (int step = 0; step < 2; ++step) {
          REQUIRE(shards::model_difference(wanted, found) == "");
          REQUIRE(step_all(wanted) == "");
          REQUIRE(step_all(found) == "");
        }
        REQUIRE(shards::model_difference(wanted, found) == "");
        for (Runs* runs : {&wanted, &found})
          REQUIRE(on_all(*runs, [](SmallRun& run) { run.finish(); }) == "");
        REQUIRE(wanted[0]->model->blocks[0]->nf4()->codes.count_nonzero().item<int64_t>() > 0);
      }
    }
  }
}

TEST_CASE("what does not go together with adapters and weights in 4 bits is one sentence",
          "[lora][session]") {
  const RegisteredOptimizer adamw = optimizer_called("FusedAdamW");
  const auto with = [&](const std::function<void(SmallRun&)>& make) {
    return [&adamw, make] {
      Runs runs = runs_of(adamw, {four_bits()}, 2, shards::sharded(Sharded::parameters));
      const std::string stepped = step_all(runs);
      require(stepped.empty(), stepped);
      const std::string message = on_all(runs, make);
      require(message.empty(), message);
    };
  };
  CHECK(faults_of({
            {"CUDA graphs on a CPU",
             {"CudaGraph needs parameters on a GPU"},
             [&] {
               SmallRun run(adamw, {four_bits()});
               run.session->use(CudaGraph());
             }},
            {"8 bits where all weights have 4",
             {"Fp8Options::quantized_weights", "Precision::bf16"},
             [&] {
               SmallRun run(adamw, {four_bits()});
               modules::quantize(*run.model, modules::Nf4Options().targets({"stack.*"}));
               run.session->use(Precision::fp8());
             }},
            {"other parameters under Shards", {"after Shards had shared them out"}, with([](SmallRun& run) {
               modules::set_adapter(*run.model, "");
               const auto batch = run.next_batch();
               auto [x, y] = run.session->begin(batch.first, batch.second);
               run.session->backward(run.model->loss(x, y));
             })},
        }) == "");

  // Weights that are on other ranks; LibTorch's error has more lines.
  const auto message_of = [&](const std::function<void(SmallModel&)>& change) {
    Runs runs = runs_of(adamw, {four_bits()}, 2, shards::sharded(Sharded::parameters));
    REQUIRE(step_all(runs) == "");
    const std::string message = on_all(runs, [&](SmallRun& run) { change(run.model); });
    for (auto& run : runs) CHECK(run->model->blocks[2]->nf4().is_empty());
    for (auto& run : runs) CHECK_FALSE(run->model->blocks[2]->is_merged());
    return message;
  };
  const auto quantized = [](SmallModel& model) {
    modules::quantize(*model, modules::Nf4Options().targets({"stack.2"}));
  };
  const auto merged = [](SmallModel& model) {
    modules::remove_adapter(*model, "default");
    modules::add_lora(*model, modules::LoraOptions(2).targets({"stack.2"}));
    modules::merge(*model);
  };
  using Catch::Matchers::ContainsSubstring;
  CHECK_THAT(message_of(quantized), ContainsSubstring("parameter stack.2.weight is shared out"));
  CHECK_THAT(message_of(merged), ContainsSubstring("parameter stack.2.weight is shared out"));
}

}  // namespace pacer::testing::lora_session
