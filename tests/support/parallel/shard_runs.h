// Runs of several ranks, sharded or not, for the tests of Shards.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <pacer/parallel/shards.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/session/small_run.h"

namespace pacer::testing::shards {

using Runs = std::vector<std::unique_ptr<SmallRun>>;
using Adds = std::function<void(SmallRun&)>;

inline const ShardsOptions kSmallUnits = ShardsOptions().unit_bytes(600);

inline void data_parallel(SmallRun& run) {
  run.session->use(DataParallel(DataParallelOptions().bucket_bytes(600).first_bucket_bytes(100)));
}
inline Adds sharded(Sharded what, ShardGroup over = ShardGroup::world) {
  return [what, over](SmallRun& run) {
    if (what == Sharded::parameters) {
      run.session->use(Shards(run.model->stack, ShardsOptions().over(over)));
    } else {
      run.session->use(Shards(ShardsOptions(kSmallUnits).what(what).over(over)));
    }
  };
}
inline const char* name_of(Sharded what) {
  constexpr const char* kNames[] = {"state", "gradients", "parameters"};
  return kNames[static_cast<size_t>(what)];
}

inline Runs runs_of(const RegisteredOptimizer& optimizer, const std::vector<RegisteredHook>& hooks,
                    int world_size, const Adds& add, int ranks_per_node = 0) {
  Runs runs;
  for (const auto& world : Communicator::in_process(world_size, by_nodes_of(ranks_per_node))) {
    runs.push_back(std::make_unique<SmallRun>(optimizer, hooks, /*dropout=*/0, world, /*own_random=*/false));
    add(*runs.back());
  }
  return runs;
}

inline std::string on_all(Runs& runs, const std::function<void(SmallRun&)>& f) {
  return first_of(
      run_ranks(static_cast<int>(runs.size()), [&](int rank) { f(*runs[static_cast<size_t>(rank)]); }));
}
inline std::string step_all(Runs& runs) {
  return on_all(runs, [](SmallRun& run) { run.step(); });
}

// Each rank's model, whole.
inline std::vector<NamedTensors> models_of(Runs& runs) {
  std::vector<NamedTensors> models(runs.size());
  REQUIRE(on_all(runs, [&](SmallRun& run) {
            const auto whole = run.session->whole_parameters();
            NamedTensors& model = models[static_cast<size_t>(run.world->rank())];
            for (const auto& [name, tensor] : detail::model_tensors(*run.model)) {
              model[name] = tensor.detach().clone();
            }
          }) == "");
  return models;
}
// The first tensor in which any rank's model differs from the first model of `wanted`; "" if none does.
inline std::string model_difference(Runs& wanted, Runs& found) {
  const NamedTensors model = models_of(wanted).front();
  for (const NamedTensors& other : models_of(found)) {
    const std::string difference = first_difference(model, other);
    if (!difference.empty()) return difference;
  }
  return "";
}

// Bytes that each of `ranks` that have parts sends for one norm of tensors of less than a unit each: as many
// sums as the rank has in which most tensors begin.
inline int64_t norm_bytes(SmallRun& run, int ranks) {
  const auto shards = run.parts->find<Shards>()->shards();
  std::vector<int64_t> begin_on(static_cast<size_t>(ranks));
  for (const ParameterShards::Part& part : shards->parts()) {
    for (size_t rank = 0; rank < begin_on.size(); ++rank) {
      begin_on[rank] += part.bounds[rank] == 0 && part.bounds[rank + 1] > 0;
    }
  }
  return (ranks - 1) * 8 * *std::max_element(begin_on.begin(), begin_on.end());
}

inline std::vector<RegisteredOptimizer> shared_optimizers() {
  auto all = all_optimizers();
  const auto is_whole = [](const RegisteredOptimizer& entry) {
    SmallModel model = small_model();
    model->to(entry.dtype);
    const auto optimizer = entry.make(model->named_parameters(), Communicator::alone(at::kCPU));
    const auto* own = dynamic_cast<SessionOptimizer*>(optimizer.get());
    return own == nullptr || !own->unshared_reason(GradientScope::world).empty();
  };
  all.erase(std::remove_if(all.begin(), all.end(), is_whole), all.end());
  return all;
}

inline std::vector<RegisteredHook> hooks_named(const std::vector<std::string>& names) {
  std::vector<RegisteredHook> hooks;
  for (const RegisteredHook& hook : all_hooks()) {
    if (std::count(names.begin(), names.end(), hook.name)) hooks.push_back(hook);
  }
  REQUIRE(hooks.size() == names.size());
  return hooks;
}

class SpoiledLoss : public Hook {
 public:
  explicit SpoiledLoss(int64_t step) : step_(step) {}
  std::string hook_name() const override { return "spoiled_loss"; }
  Slot slot() const override { return Slot::loss; }
  void forward_begin(const Progress& progress) override { now_ = progress.step; }
  Tensor scale_loss(Tensor loss) override {
    return now_ == step_ ? loss * std::numeric_limits<float>::quiet_NaN() : loss;
  }

 private:
  int64_t step_, now_ = 0;
};

}  // namespace pacer::testing::shards
