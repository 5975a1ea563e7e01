// Checkpoints and files of weights, and models whose blocks have no memory at first.
#include <filesystem>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/checkpoints/load_blocks.h>
#include <pacer/checkpoints/load_weights.h>
#include <pacer/checkpoints/save_weights.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/hooks/weight_average.h>
#include <pacer/optimizers/fused_lamb.h>

#include "support/captured_stderr.h"
#include "support/cpu_memory.h"
#include "support/parallel/deferred_runs.h"
#include "support/temporary_folder.h"

namespace pacer::testing::deferred {

namespace {

Plan with_checkpoints(Plan plan, const std::string& folder, int64_t resumes_from) {
  plan.use = [folder, others = plan.use](Session& session) {
    others(session);
    session.use(Checkpoints(CheckpointsOptions(folder).every(2).keep(100).synchronous(true)));
  };
  if (resumes_from == 0) return plan;
  plan.materialize = [](const DeferredBlock& block) { throw Error("values were made for " + block.name); };
  plan.before_steps = [resumes_from](Session& session, OddModel&) {
    require(session.resume(ResumeOptions().step(resumes_from)) == resumes_from, "nothing was resumed");
  };
  return plan;
}

Plan whole_one(Plan plan) {
  plan.is_deferred = false;
  return plan;
}

}  // namespace

TEST_CASE("deferred blocks have their values from a checkpoint of any number of ranks, to the bit",
          "[checkpoints][deferred][resume]") {
  const CapturedStderr quiet;
  std::vector<Plan> table(3);
  table[1].dtype = at::kBFloat16;
  table[1].optimizer = adamw(FusedAdamWOptions(0.01).master_weights(MasterWeights::remainder));
  table[2].optimizer = [](torch::nn::Module& model) {
    return std::make_unique<FusedLamb>(parameters_of(model), FusedLambOptions(0.01));
  };
  table[2].use = [](Session& session) {
    session.use(GradientClipping(0.1))
        .use(WeightAverage(WeightAverageOptions().decay(0.5).in_evaluation(false)));
  };
  for (Plan& plan : table) {
    INFO(&plan - table.data());
    const TemporaryFolder folder;
    plan.steps = 5;
    plan.odd.wider = 300;  // bounds between ranks cut matrices
    const auto uninterrupted = trained(plan);
    Plan killed = with_checkpoints(plan, folder.path(), 0);
    killed.steps = 3;
    trained(killed);
    for (const int world_size : {2, 3, 1}) {
      INFO(world_size);
      const TemporaryFolder a, b;
      std::filesystem::copy(folder.path(), a.path(), std::filesystem::copy_options::recursive);
      std::filesystem::copy(folder.path(), b.path(), std::filesystem::copy_options::recursive);
      plan.world_size = world_size;
      const auto found = trained(with_checkpoints(plan, a.path(), 2));
      require_same(found, trained(with_checkpoints(whole_one(plan), b.path(), 2)));
      if (world_size == 2) require_same(found, uninterrupted);
    }
  }
}

TEST_CASE("blocks are loaded from files one by one as load_weights loads a whole model",
          "[checkpoints][deferred]") {
  const CapturedStderr quiet;
  const TemporaryFolder folder;
  Plan plan;
  plan.steps = 2;
  OddModel original = model_of(whole_one(plan));
  const std::string file = folder.path() + "/model.safetensors";
  save_weights(*original, file);
  const auto wanted = trained(plan);
  plan.materialize = load_blocks(file);
  require_same(trained(plan), wanted);

  // The files of a checkpoint of two ranks.
  plan = with_checkpoints(plan, folder.path() + "/run", 0);
  trained(plan);
  OddModel loaded = model_of(whole_one(Plan())), found = model_of(whole_one(Plan()));
  load_weights(*loaded, folder.path() + "/run");
  const at::NoGradGuard no_grad;
  const MaterializeBlock load = load_blocks(folder.path() + "/run");
  for (size_t i = 0; i < found->blocks->size(); ++i) {
    load({*found->blocks->ptr(i), i, "blocks." + std::to_string(i)});
    const auto values = found->blocks->ptr(i)->parameters(), others = loaded->blocks->ptr(i)->parameters();
    for (size_t k = 0; k < values.size(); ++k) REQUIRE(values[k].equal(others[k]));
  }
}

TEST_CASE("of a tensor in a file a piece can be read, beside which are zeros", "[checkpoints][deferred]") {
  const TemporaryFolder folder;
  const std::string file = folder.path() + "/model.safetensors";
  torch::nn::Linear layer(30, 20);
  save_weights(*layer, file);
  FileReader reader(posix_file_system(), file);
  const NamedTensors read = detail::read_tensors(
      reader, file, nullptr, detail::Unwanted::read, [](const std::string& name, at::IntArrayRef) {
        return name == "weight" ? std::optional(detail::TensorPiece{123, 200}) : std::nullopt;
      });
  Tensor wanted = torch::zeros({600});
  wanted.slice(0, 123, 323).copy_(layer->weight.detach().view({-1}).slice(0, 123, 323));
  REQUIRE(read.at("weight").view({-1}).equal(wanted));
  REQUIRE(read.at("bias").equal(layer->bias));
}

TEST_CASE("load_blocks reads the values of one block, and says what does not fit",
          "[checkpoints][deferred]") {
  using Catch::Matchers::Contains;
  const TemporaryFolder folder;
  const std::string file = folder.path() + "/model.safetensors";
  OddOptions odd;
  odd.width = 64;
  odd.depth = 8;
  OddModel model(odd);
  save_weights(*model, file);
  const MaterializeBlock load = load_blocks(file);
  const auto call = [&](const char* name) { load({*model->blocks->ptr(0), 0, name}); };
  const CountedCpuMemory counted;
  CountedCpuMemory::reset_peak();
  const int64_t before = CountedCpuMemory::live();
  call("blocks.5");
  const int64_t block_bytes = 4 * (65 * 66 + 67 * 64 + 1);
  REQUIRE(CountedCpuMemory::peak() - before < 2 * block_bytes);
  REQUIRE_THROWS_WITH(call("layers.5"),
                      Contains("cannot load layers.5.scale from " + file) && Contains("no such tensor"));
  model->blocks->ptr(0)->parameters()[0].set_data(torch::ones({2}));
  REQUIRE_THROWS_WITH(call("blocks.0"), Contains("blocks.0.scale") && Contains("of shape [1] there"));
  REQUIRE_THROWS_AS(load_blocks(folder.path() + "/nowhere")({*model, 0, "blocks.0"}), FileError);
  OddModel empty = model_of(Plan());
  REQUIRE_THROWS_WITH(load_weights(*empty, file), Contains("materialize(load_blocks(path))"));
}

}  // namespace pacer::testing::deferred
