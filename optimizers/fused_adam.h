// FusedAdam and FusedAdamW: torch::optim::Adam and AdamW with one memory-bound kernel for all parameters
// instead of a loop of small operations. Same rule (to a few units in the last place), same interface, same
// state, same archives.
//
//   pacer::FusedAdamW optimizer(model->parameters(), pacer::FusedAdamWOptions(3e-4).weight_decay(0.1));
//
// Parameters: any shape, count and stride; fp64, fp32, bf16 or fp16; all on one device, CPU or CUDA.
// Parameters whose gradient is undefined sit the step out. Bad input throws InvalidArgument before anything
// is changed: sparse gradients, a tensor given twice (tied weights count once), parameters that share memory,
// devices mixed. On CUDA a step is enqueued on the current stream and does not synchronise; the learning rate
// may change every step, and a step whose gradients keep their addresses can be captured in a CUDA graph.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <pacer/optimizers/adam_options.h>
#include <pacer/optimizers/adam_param_state.h>
#include <pacer/optimizers/named_parameters.h>
#include <pacer/optimizers/session_optimizer.h>

namespace torch::optim {
class Adam;
class AdamW;
}  // namespace torch::optim

namespace pacer {

namespace detail {
class AdamEngine;
struct AdamFlavour;
struct PendingState;
}  // namespace detail

// What the two share. Not used directly.
class FusedAdamBase : public SessionOptimizer {
 public:
  FusedAdamBase(FusedAdamBase&&) noexcept;
  FusedAdamBase& operator=(FusedAdamBase&&) noexcept;
  ~FusedAdamBase() override;

  // Updates every parameter that has a gradient. The closure, if given, is called first, with gradients
  // enabled, and its loss is returned.
  torch::Tensor step(LossClosure closure = nullptr) override;

  // Options of the group may be this optimizer's or the torch optimizer's; without options it takes the
  // defaults.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  void add_param_group(const NamedParamGroup& group);

  // Steps that changed nothing because a gradient was not finite (finite_check, or the guard of a Session).
  // Waits for the device on a GPU.
  int64_t skipped_steps() const override;

  std::string parameter_name(const torch::Tensor& parameter) const override;
  void name_parameters(const NamedParameters& names) override;
  double base_lr(size_t group) override;

  void prepare(const StepInputs& inputs) override;
  bool enqueue() override;
  void conclude(bool applied) override;
  int64_t enqueue_version() const override;

  NamedTensors export_state() const override;
  void import_state(const NamedTensors& state) override;

 protected:
  FusedAdamBase(const detail::AdamFlavour& flavour,
                const std::vector<torch::optim::OptimizerParamGroup>& groups,
                std::unique_ptr<torch::optim::OptimizerOptions> defaults);
  FusedAdamBase(const detail::AdamFlavour& flavour, const std::vector<NamedParamGroup>& groups,
                std::unique_ptr<torch::optim::OptimizerOptions> defaults);

  // Checks state and options that were read, then puts them in force.
  void restore(detail::PendingState pending);
  const std::unordered_map<const void*, std::string>& names() const { return names_; }

  // Groups added through the base class may still carry torch's options; from now on they have this
  // optimizer's own, of equal values.
  void adopt_foreign_options() const;

 private:
  const detail::AdamFlavour* flavour_;
  std::unordered_map<const void*, std::string> names_;  // by TensorImpl
  std::unique_ptr<detail::AdamEngine> engine_;
};

// Adam with L2 weight decay (0 by default).
class FusedAdam : public FusedAdamBase {
 public:
  explicit FusedAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     FusedAdamOptions defaults = {});
  explicit FusedAdam(std::vector<torch::Tensor> parameters, FusedAdamOptions defaults = {});
  explicit FusedAdam(const NamedParameters& parameters, FusedAdamOptions defaults = {});
  explicit FusedAdam(const std::vector<NamedParamGroup>& groups, FusedAdamOptions defaults = {});

  // Copies options, moments and step counts of an optimizer over the same parameters, in the same groups and
  // order.
  void take_over(const torch::optim::Adam& source);

  // The archive format of torch::optim::Adam, with more keys: files of that optimizer load here as they are.
  // A load is checked completely first; one that fails changes nothing.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

// AdamW: Adam with decoupled weight decay (0.01 by default).
class FusedAdamW : public FusedAdamBase {
 public:
  explicit FusedAdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      FusedAdamWOptions defaults = {});
  explicit FusedAdamW(std::vector<torch::Tensor> parameters, FusedAdamWOptions defaults = {});
  explicit FusedAdamW(const NamedParameters& parameters, FusedAdamWOptions defaults = {});
  explicit FusedAdamW(const std::vector<NamedParamGroup>& groups, FusedAdamWOptions defaults = {});

  // As FusedAdam::take_over.
  void take_over(const torch::optim::AdamW& source);

  // The archive format of torch::optim::AdamW, with more keys: files of that optimizer load here as they are.
  // A load is checked completely first; one that fails changes nothing.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace pacer
