// A training run of the small model with one of the registered optimizers and some of the registered hooks,
// and what is compared of two runs: everything that a checkpoint holds.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/device/detail/random_state.h>

#include "support/captured_stderr.h"
#include "support/session/registry.h"

namespace pacer::testing {

// A snapshot of everything a checkpoint holds.
inline detail::TrainingState copied(const detail::TrainingState& state) {
  detail::TrainingState copy;
  const auto clone = [](const NamedTensors& from, NamedTensors& to) {
    for (const auto& [name, tensor] : from) to[name] = tensor.detach().clone();
  };
  clone(state.model, copy.model);
  clone(state.optimizer, copy.optimizer);
  clone(state.rank_optimizer, copy.rank_optimizer);
  clone(state.session, copy.session);
  return copy;
}

// The name of the first tensor that differs; empty if none does.
inline std::string first_difference(const NamedTensors& a, const NamedTensors& b) {
  for (const auto& item : a) {
    const auto found = b.find(item.first);
    if (found == b.end() || !same_bits(item.second.cpu(), found->second.cpu())) return item.first;
  }
  for (const auto& item : b) {
    if (a.count(item.first) == 0) return item.first;
  }
  return "";
}
inline std::string first_difference(const detail::TrainingState& a, const detail::TrainingState& b) {
  for (const auto part : {&detail::TrainingState::model, &detail::TrainingState::optimizer,
                          &detail::TrainingState::rank_optimizer, &detail::TrainingState::session}) {
    const std::string difference = first_difference(a.*part, b.*part);
    if (!difference.empty()) return difference;
  }
  return "";
}

// Gives tests the parts of a Session.
class PartsProbe : public Hook {
 public:
  explicit PartsProbe(SessionParts*& parts) : parts_(&parts) {}
  std::string hook_name() const override { return "parts_probe"; }
  Slot slot() const override { return Slot::record; }
  void attach(SessionParts& parts) override { *parts_ = &parts; }

 private:
  SessionParts** parts_;
};

// One training run: model, optimizer, sampler, Session with hooks, and a random state of its own. Batches are
// a function of progress, or with the sampler's hook come from the sampler.
class SmallRun {
 public:
  SmallRun(const RegisteredOptimizer& optimizer_entry, const std::vector<RegisteredHook>& hooks,
           double dropout = 0.1, at::Device device = at::kCPU)
      : SmallRun(optimizer_entry, hooks, dropout, Communicator::alone(device)) {}

  // As one rank of a world, on its own part of the data. Ranks that are threads share LibTorch's generators:
  // without dropout nothing is drawn, and `own_random` must be false.
  SmallRun(const RegisteredOptimizer& optimizer_entry, const std::vector<RegisteredHook>& hooks,
           double dropout, std::shared_ptr<Communicator> ranks, bool own_random = true)
      : sampler(9, /*seed=*/3, *ranks), world(std::move(ranks)), own_random_(own_random) {
    const at::Device device = world->device();
    bool gates = false, fused = false, changed = false;
    for (const RegisteredHook& hook : hooks) {
      changed = changed || hook.change_model;
      gates = gates || hook.needs_gates;
      fused = fused || hook.needs_fused_layers;
      uses_sampler_ = uses_sampler_ || hook.kind == "sampler";
      if (hook.make_sampler) sampler = hook.make_sampler(*world);
    }
    const LayerDrop layer_drop = gates ? LayerDrop(early_drops()) : LayerDrop(nullptr);
    model = small_model(dropout, layer_drop, /*depth=*/3, fused);
    model->to(device, optimizer_entry.dtype);
    for (const RegisteredHook& hook : hooks) {
      if (hook.change_model) hook.change_model(model, dropout);
    }
    optimizer = optimizer_entry.make(changed ? modules::trainable(*model) : model->named_parameters(), world);
    session = std::make_unique<Session>(*model, *optimizer, world);
    session->use(PartsProbe(parts));
    for (const RegisteredHook& hook : hooks) hook.use(*session, model, sampler);
    if (!own_random_) return;
    torch::manual_seed(17);
    random_ = detail::get_random_state(device);
  }

  // Of the next micro-step: a function of progress, or with the sampler's hook from the sampler.
  std::pair<Tensor, Tensor> next_batch() {
    const Progress& progress = session->progress();
    if (!uses_sampler_) {
      const int64_t micro_batch = progress.step * parts->micro_steps + progress.micro_step;
      return small_batch(micro_batch * std::max(shards, world->world_size()) + world->rank());
    }
    auto examples = sampler.next(2);
    if (!examples) {
      sampler.reset();
      examples = sampler.next(2);
    }
    return small_batch(static_cast<int64_t>(examples->front()), static_cast<int64_t>(examples->size()));
  }

  // One optimizer step, with all its micro-steps. `spoil` sees the model between the last backward and step.
  void step(const std::function<void(SmallModel&)>& spoil = nullptr) {
    const OwnRandomState own(*this);
    for (bool stepped = false; !stepped;) {
      const auto batch = next_batch();
      auto [x, y] = session->begin(batch.first, batch.second);
      const Tensor value = model->loss(x, y);
      session->backward(value);
      const bool last = session->progress().micro_step + 1 == session->progress().micro_steps;
      if (spoil && last) spoil(model);
      stepped = session->step();
      loss = value.item<double>();
    }
  }

  detail::TrainingState state() {
    const OwnRandomState own(*this);
    return copied(detail::export_state(*parts));
  }

  // Goes on from there.
  void load(const detail::TrainingState& state) {
    const OwnRandomState own(*this);
    detail::import_state(*parts, state);
    if (uses_sampler_) sampler.reset();
  }
  void finish() {
    const OwnRandomState own(*this);
    session->finish();
  }
  // Draws are those of this seed from now on.
  void seed(uint64_t seed) {
    const OwnRandomState own(*this);
    torch::manual_seed(seed);
  }
  // Goes on from the checkpoints of a hook that is in use.
  std::optional<int64_t> resume() {
    const OwnRandomState own(*this);
    const CapturedStderr quiet;
    const auto step = session->resume();
    if (step && uses_sampler_) sampler.reset();
    return step;
  }

  EpochSampler sampler;
  std::shared_ptr<Communicator> world;
  SmallModel model = nullptr;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<Session> session;
  SessionParts* parts = nullptr;
  double loss = 0;
  int shards = 1;  // of the data, where that is more than the world's size

 private:
  // While it lives, LibTorch's generators are where this run left them.
  class OwnRandomState {
   public:
    explicit OwnRandomState(SmallRun& run) : run_(run) {
      if (!run.own_random_) return;
      others_ = detail::get_random_state(run.parts->device());
      detail::set_random_state(run.parts->device(), run.random_);
    }
    ~OwnRandomState() {
      if (!run_.own_random_) return;
      run_.random_ = detail::get_random_state(run_.parts->device());
      detail::set_random_state(run_.parts->device(), others_);
    }

   private:
    SmallRun& run_;
    detail::RandomState others_;
  };

  bool own_random_ = true;
  bool uses_sampler_ = false;
  detail::RandomState random_;
};

// The first name that differs between the states of two runs, but for what is a rank's own and what data
// parallelism itself keeps.
inline std::string replica_difference(SmallRun& a, SmallRun& b) {
  auto x = a.state(), y = b.state();
  for (auto* state : {&x, &y}) {
    state->rank_optimizer.clear();
    state->session.erase("hook/data_parallel/bucket_order");
    state->session.erase("progress/micro_batches");  // the reference takes those of all ranks alone
  }
  return first_difference(x, y);
}

}  // namespace pacer::testing
