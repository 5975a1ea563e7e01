// Averages of the weights over a training: an exponential moving average (EMA), or the mean of all from some
// step on (stochastic weight averaging; Izmailov et al., arXiv:1803.05407). Training goes on with the weights
// themselves; what is measured and kept is the average.
//
//   session.use(pacer::WeightAverage(pacer::ema(0.999)))
//       .use(pacer::Validation(500, [&] { return mean_loss(*model, validation_set); }))
//       .use(pacer::SaveBest("run/best"));
//   session.use(pacer::WeightAverage(pacer::tail_average(8'000)));  // the mean of the weights from step 8,000 on
//
// In evaluation the model has the average: in Session::evaluate and Validation, and so in what follows from
// its value: EarlyStopping, and SaveBest, whose file is what was measured. Elsewhere:
//
//   const auto average = std::make_shared<pacer::WeightAverage>(pacer::ema(0.999));
//   session.use(average);
//   ...
//   { const auto averaged = average->in_model();  pacer::save_weights(*model, "averaged.safetensors"); }
//
// Averaged are the parameters that the optimizer trains; buffers stay those of training. Running statistics
// of a batch norm belong to the weights that they were measured with: call update_batch_norm
// (hooks/update_batch_norm.h) once the average is in the model, before it is used or saved.
//
// It costs memory of one more copy of the parameters, in fp32 where they have 16 bits, and for as long as an
// evaluation lasts another one, at a time at which there are no gradients. An update reads the parameters
// once, and reads and writes the average. Nothing waits for the GPU.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <pacer/hooks/hook.h>

namespace pacer {

struct WeightAverageOptions {
  WeightAverageOptions() = default;
  // What stays of the average at an update, in [0, 1): average = decay average + (1 - decay) weights. Not
  // set: all updates count alike.
  TORCH_ARG(std::optional<double>, decay);
  // With a decay: at most (1 + n) / (10 + n) of the average stays where it has n updates, so that what the
  // run began with is soon forgotten.
  TORCH_ARG(bool, warm_up) = false;
  // Steps between two updates, >= 1: weights count after each step that is a multiple of it.
  TORCH_ARG(int64_t, every) = 1;
  // The first step after which weights count, >= 0. The first update is a copy; before it, evaluation sees
  // the weights themselves.
  TORCH_ARG(int64_t, from_step) = 0;
  // Where the average is, at::kCPU for host memory, to which each update then copies the parameters, and for
  // which it waits. Not set: beside the parameters.
  TORCH_ARG(std::optional<at::Device>, device);
  // Whether the model has the average in evaluation. False: only where in_model() puts it there.
  TORCH_ARG(bool, in_evaluation) = true;
};

// The exponential moving average with that decay.
WeightAverageOptions ema(double decay);
// The mean of the weights after each step from `from_step` on.
WeightAverageOptions tail_average(int64_t from_step);

class WeightAverage : public Hook {
 public:
  // Throws InvalidArgument for options out of range.
  explicit WeightAverage(WeightAverageOptions options);
  WeightAverage(WeightAverage&&) noexcept;
  ~WeightAverage() override;

  // While it exists, the model has the average. It must not outlive the Session.
  class InModel {
   public:
    explicit InModel(WeightAverage& average);
    InModel(const InModel&) = delete;
    ~InModel();

   private:
    WeightAverage& average_;
  };
  // Between steps. Throws InvalidArgument where there is no average yet.
  [[nodiscard]] InModel in_model();

  // How many times weights were added to the average.
  int64_t updates() const { return updates_; }
  // The averages by the parameters' names, in their own memory; empty before the first update. Where ranks
  // keep parts of the parameters, those of this rank's elements, as vectors.
  NamedTensors averages() const;

  std::string hook_name() const override { return "weight_average"; }
  Slot slot() const override { return Slot::optimize; }
  void attach(SessionParts& parts) override;
  std::string agreement() const override;
  void start(const Progress& progress) override;
  // Throws InvalidArgument while the average is in the model.
  void begin(const Progress& progress, MicroBatch& batch) override;
  void forward_begin(const Progress& progress) override;
  void after_step(StepReport& report) override;
  void finish(const Progress& progress) override;
  void evaluation_begin() override;
  void evaluation_end() noexcept override;
  void save(NamedTensors& state) const override;
  void load(const NamedTensors& state) override;
  NamedTensors parameter_state() override;
  std::function<void()> prepare_parameter_state(const NamedTensors& state) override;

 private:
  struct Averaged;  // a parameter, with its average

  void put_in_model();
  void take_from_model() noexcept;
  bool lists_all() const;
  void list_parameters();
  bool keeps_parts() const;
  Averaged entry_for(const std::string& name, const at::Tensor& parameter, const at::Tensor& own) const;
  double share_of_update() const;
  void take_in(int64_t step);
  void catch_up();

  WeightAverageOptions options_;
  SessionParts* parts_ = nullptr;
  std::vector<Averaged> averaged_;
  int64_t updates_ = 0;
  int64_t seen_step_ = -1;     // the last one whose weights were taken in; -1 before training starts
  size_t added_ = 0;           // of an update that memory was too short for
  bool of_parts_ = false;      // averaged are this rank's parts
  bool has_prepared_ = false;  // there is an average to load
  int64_t in_model_ = 0;       // how many scopes there are, one inside the other
};

}  // namespace pacer
