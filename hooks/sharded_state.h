// What a Session and other hooks ask of the hook whose ranks each have a part of the optimizer's state, and
// maybe of the parameters (Shards).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <pacer/collectives/parameter_range.h>
#include <pacer/hooks/progress.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer {

class Communicator;

// While one exists, every parameter has its values, on every rank: see Session::whole_parameters.
class WholeParameters {
 public:
  // The values stay until `values` is destroyed. Null: they are always there.
  explicit WholeParameters(std::shared_ptr<const void> values) : values_(std::move(values)) {}
  WholeParameters(WholeParameters&&) noexcept = default;
  WholeParameters& operator=(WholeParameters&&) = delete;

 private:
  std::shared_ptr<const void> values_;
};

// Names of what hooks keep for each parameter (Hook::parameter_state) begin with it among the optimizer's state.
constexpr const char* kFieldOfHook = "hook.";

class ShardedState {
 public:
  virtual ~ShardedState() = default;

  // Whether parameters have their values for a while only, from now on.
  virtual bool keeps_parts() const = 0;
  // Whether that will be so from the first begin on, where there are several ranks.
  virtual bool shares_parameters() const = 0;
  // While the result exists, every parameter has its values. All ranks together.
  virtual WholeParameters whole_parameters() = 0;
  // Whether such a result exists.
  virtual bool all_are_whole() const = 0;
  // This rank's part of each parameter that is shared out, once they are. The part's values, as the optimizer updates
  // them, are defined with keeps_parts() only.
  virtual ParameterRanges kept_parts() const = 0;
  // This rank's part of the gradients of the coming step, of each parameter that is shared out, and the ranks that
  // have the others; null: every rank has whole gradients, where parameters have them. From gradients_ready of
  // this hook on.
  struct GradientParts {
    ParameterRanges parts;
    std::shared_ptr<Communicator> ranks;
  };
  virtual GradientParts gradient_parts() const = 0;
  // A backward pass as in training, whose gradients come together and count for nothing.
  virtual void run_idle_pass(const Progress& progress, const std::function<void()>& backward) = 0;
  // Throws CommunicationError, on all ranks, where they have not all gathered the same since the last time.
  // Only with keeps_parts().
  virtual void require_same_history() const = 0;

  // ---- For checkpoints. `state` is the optimizer's export_state(), of which each rank has a part, and what
  // hooks have beside it, whose names begin with kFieldOfHook: of which a rank has a part where it keeps parts
  // of the parameters. ----

  // The same names with whole tensors without memory (device meta) in the place of parts.
  virtual NamedTensors whole_specs(NamedTensors state) const = 0;
  // The whole tensors, on the CPU, each on the rank that `owner` says; parts of them elsewhere. All ranks
  // together, with the same owners.
  using StateOwner = std::function<int(const std::string& name)>;
  virtual NamedTensors gather_state(NamedTensors state, const StateOwner& owner) const = 0;
  // The same for tensors of the model, by name. Where ranks have all of the parameters, it does nothing.
  virtual NamedTensors gather_model(NamedTensors model, const StateOwner& owner) const = 0;
};

}  // namespace pacer
