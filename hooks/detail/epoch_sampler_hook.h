// What a Session does for an EpochSampler: counts the examples that were trained on, saves the position.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/sampler_state.h>
#include <pacer/hooks/epoch_sampler.h>
#include <pacer/hooks/hook.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/step_report.h>

namespace pacer::detail {

// Whether the sampler that last handed out examples to this thread is in no Session, and nobody counts them.
bool sampler_is_unseen();

class EpochSamplerHook : public Hook {
 public:
  explicit EpochSamplerHook(EpochSampler sampler) : sampler_(std::move(sampler)) {}
  ~EpochSamplerHook() override { leave(); }

  std::string hook_name() const override { return "epoch_sampler"; }
  Slot slot() const override { return Slot::data; }
  // One of fewer ranks may be that of a Pipeline's replicas.
  void attach(SessionParts& parts) override {
    if (sampler_.world_size() >= parts.world().world_size()) require_ranks(parts.world());
    sampler_.enter_session();
    parts.counts_examples = true;
    parts_ = &parts;
  }
  void arrange() override { require_ranks(parts_->data_ranks()); }
  std::string agreement() const override {
    const std::string text = concatenate(sampler_.size(), " examples, seed ", sampler_.seed());
    const auto rules = shared().rules();
    return rules ? concatenate(text, ", ", shared().name(), " of lengths and options with the checksum ",
                               *rules)
                 : text;
  }
  // In backward, so that a micro-step that is begun again counts once.
  at::Tensor scale_loss(at::Tensor loss) override {
    sampler_.count(std::exchange(parts_->micro_batch_examples, 0));
    return loss;
  }
  void finish(const Progress& /*progress*/) override { leave(); }
  void after_step(StepReport& report) override {
    report.add("epoch", static_cast<double>(sampler_.epoch()));
    if (const auto padding = shared().padding()) report.add("padding", *padding);
  }
  void save(NamedTensors& state) const override {
    state["size"] = number_tensor(static_cast<int64_t>(sampler_.size()));
    state["seed"] = number_tensor(static_cast<int64_t>(sampler_.seed()));
    state["epoch"] = number_tensor(sampler_.epoch());
    state["examples"] = number_tensor(sampler_.examples_trained());
    if (const auto rules = shared().rules()) state["rules"] = number_tensor(*rules);
  }
  void load(const NamedTensors& state) override {
    const auto check = [&](const char* name, uint64_t own) {
      const auto saved = static_cast<uint64_t>(require_number<int64_t>(state, name));
      require(saved == own, "the ", shared().name(), " of the checkpoint has ", name, " ", saved,
              ", but this one has ", own, "; resume with the same data set and seed");
    };
    check("size", sampler_.size());
    check("seed", sampler_.seed());
    if (const auto rules = shared().rules()) {
      require(require_number<int64_t>(state, "rules") == *rules, "the ", shared().name(),
              " of the checkpoint has other lengths or options than this one; resume with the same");
    }
    const auto examples = require_number<int64_t>(state, "examples");
    sampler_.resume_at(require_number<int64_t>(state, "epoch"), examples);
  }

 private:
  void leave() {
    if (parts_ && !std::exchange(has_left_, true)) sampler_.leave_session();
  }
  void require_ranks(const Communicator& ranks) const {
    require(sampler_.rank() == ranks.rank() && sampler_.world_size() == ranks.world_size(), "the ",
            shared().name(), " is that of rank ", sampler_.rank(), " of ", sampler_.world_size(),
            ", but this is rank ", ranks.rank(), " of ", ranks.world_size(), "; make it with ",
            shared().call_with_ranks(), ", with a Pipeline from *grid.replicas()");
  }
  const EpochSampler::State& shared() const { return *sampler_.state_; }

  EpochSampler sampler_;
  SessionParts* parts_ = nullptr;
  bool has_left_ = false;
};

}  // namespace pacer::detail
