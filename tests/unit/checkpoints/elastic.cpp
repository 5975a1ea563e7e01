// R2: runs that go on with another number of ranks: the same model, optimizer and position, and of a 1-bit
// optimizer the same errors in sum.
#include <algorithm>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/samples.h"
#include "support/session/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {
namespace elastic {

using Runs = std::vector<std::unique_ptr<SmallRun>>;

// Saving takes as long as some steps, and only what is gone on from has to be there.
constexpr int kSteps = 5;

Runs runs_in(const std::string& folder, const RegisteredOptimizer& optimizer, int world_size) {
  std::vector<RegisteredHook> hooks;
  for (const RegisteredHook& hook : all_hooks()) {
    const auto used = {"accumulation", "clipping", "curriculum", "learning rate", "sampler"};
    if (std::count(used.begin(), used.end(), hook.name)) hooks.push_back(hook);
  }
  Runs runs;
  for (const auto& world : Communicator::in_process(world_size)) {
    runs.push_back(std::make_unique<SmallRun>(optimizer, hooks, /*dropout=*/0, world, /*own_random=*/false));
    runs.back()->session->use(
        Checkpoints(CheckpointsOptions(folder).every(kSteps).keep(100).synchronous(true)));
  }
  return runs;
}

std::string on_all(Runs& runs, const std::function<void(SmallRun&)>& f) {
  return first_of(
      run_ranks(static_cast<int>(runs.size()), [&](int rank) { f(*runs[static_cast<size_t>(rank)]); }));
}

std::string resume_all(Runs& runs) {
  const CapturedStderr quiet;
  return on_all(runs, [](SmallRun& run) {
    run.session->resume();
    run.sampler.reset();
  });
}

// What the errors of all ranks add to the sum of results: mean of the workers' plus the servers', by
// parameter.
std::map<std::string, Tensor> error_mass(const std::vector<NamedTensors>& ranks,
                                         const NamedParameters& parameters) {
  std::map<std::string, Tensor> mass;
  for (const auto& item : parameters) {
    const std::string& name = item.key();
    Tensor sum = torch::zeros({item.value().numel()}, at::kDouble);
    std::vector<Tensor> server;
    for (const NamedTensors& rank : ranks) {
      const auto find = [&](const char* key) {
        const auto found = rank.find(name + key);
        return found == rank.end() ? Tensor() : found->second.detach().to(at::kDouble).reshape({-1});
      };
      for (const char* key : {"/worker_error", "/momentum_error"}) {
        if (find(key).defined()) sum += find(key) / static_cast<double>(ranks.size());
      }
      if (find("/server_error").defined()) server.push_back(find("/server_error"));
    }
    if (!server.empty()) sum += torch::cat(server);
    mass[name] = sum;
  }
  return mass;
}

}  // namespace elastic
}  // namespace

TEST_CASE(
    "R2: another number of ranks goes on from the same model and position, and from the same errors in sum",
    "[session][resume][ranks][onebit]") {
  using namespace elastic;
  const std::pair<int, int> changes[] = {{4, 2}, {2, 4}, {4, 3}, {1, 4}, {4, 1}};
  // A 1-bit optimizer takes every second change, and the next one the others; of those that have nothing of a rank's
  // own, some take one.
  Turns with_ranks(2), others(8);
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    for (const auto& [before, after] : changes) {
      if (!(optimizer.has_ranks ? with_ranks : others).is_next()) continue;
      INFO(optimizer.name << ", from " << before << " to " << after << " ranks");
      const TemporaryFolder folder;
      Runs runs = runs_in(folder.path(), optimizer, before);
      for (int step = 0; step < kSteps; ++step)
        REQUIRE(on_all(runs, [](SmallRun& run) { run.step(); }) == "");
      Runs resumed = runs_in(folder.path(), optimizer, after);
      REQUIRE(resume_all(resumed) == "");

      const auto saved = runs.front()->state();
      std::vector<NamedTensors> old_errors, new_errors;
      for (const auto& run : runs) old_errors.push_back(run->state().rank_optimizer);
      for (const auto& run : resumed) {
        const auto state = run->state();
        REQUIRE(first_difference(state.model, saved.model) == "");
        REQUIRE(first_difference(state.optimizer, saved.optimizer) == "");
        REQUIRE(run->session->progress().step == kSteps);
        REQUIRE(run->session->progress().tokens == runs.front()->session->progress().tokens);
        REQUIRE(run->sampler.examples_trained() == runs.front()->sampler.examples_trained());
        new_errors.push_back(state.rank_optimizer);
      }
      const auto parameters = runs.front()->model->named_parameters();
      const auto old_mass = error_mass(old_errors, parameters), new_mass = error_mass(new_errors, parameters);
      for (const auto& [name, mass] : old_mass) {
        INFO(name);
        // Means and sums in fp64, each result rounded to fp32 once: 2^-24 of the largest term, twice.
        const double largest = mass.numel() == 0 ? 0 : mass.abs().max().item<double>();
        REQUIRE((new_mass.at(name) - mass).abs().le(1e-6 * largest).all().item<bool>());
      }
      // It trains on, and replicas stay identical.
      for (int step = 0; step < 3; ++step) {
        REQUIRE(on_all(resumed, [](SmallRun& run) { run.step(); }) == "");
        const auto first = resumed.front()->state();
        for (const auto& run : resumed) REQUIRE(first_difference(run->state().model, first.model) == "");
      }
    }
  }
}

TEST_CASE("R2: errors that outlive compression are added to the momentum once",
          "[session][resume][ranks][onebit]") {
  using namespace elastic;
  const auto optimizers = all_optimizers();
  const auto optimizer = *std::find_if(optimizers.begin(), optimizers.end(),
                                       [](const auto& o) { return o.name == "OneBitAdam uncompressed"; });
  const TemporaryFolder folder;
  Runs runs = runs_in(folder.path(), optimizer, 4);
  for (int step = 0; step < kSteps; ++step) REQUIRE(on_all(runs, [](SmallRun& run) { run.step(); }) == "");
  Runs with = runs_in(folder.path(), optimizer, 1), without = runs_in(folder.path(), optimizer, 1);
  REQUIRE(resume_all(with) == "");
  REQUIRE(resume_all(without) == "");
  const auto errors = with.front()->state().rank_optimizer;
  REQUIRE(errors.size() > 0);
  auto stripped = without.front()->state();
  stripped.rank_optimizer.clear();
  without.front()->load(stripped);
  with.front()->step();
  without.front()->step();
  const auto a = with.front()->state(), b = without.front()->state();
  REQUIRE(a.rank_optimizer.empty());
  for (const auto& [key, error] : errors) {
    const std::string momentum = key.substr(0, key.rfind('/')) + "/exp_avg";
    REQUIRE(a.optimizer.at(momentum).equal(b.optimizer.at(momentum) + error));
  }
}

}  // namespace pacer::testing
