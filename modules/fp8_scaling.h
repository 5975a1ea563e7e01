// The scales of all tensors that the pacer::modules::Linear of a model cast to 8-bit floats, and the switch
// that makes them do so. The hook Precision::fp8 has one; a loop of one's own uses it like this:
//
//   auto scaling = std::make_shared<pacer::Fp8Scaling>(*model, pacer::Fp8Options());
//   {
//     pacer::Fp8Scope scope(scaling);      // under autocast, if the model is fp32
//     loss = criterion(model->forward(x), y);
//   }
//   loss.backward();
//   optimizer.step();
//   scaling->update();                     // once per optimizer step, however many passes it had
//
// Activations and weights are cast to e4m3, gradients to e5m2 (Micikevicius et al., arXiv:2209.05433), each
// with a scale of its own; products are added in fp32. Weights are cast once per step. A tensor with a number
// that is not finite makes its products NaN, as in 16 bits, so that what looks at gradients sees it. Scales
// stand still between updates, so that passes that are recomputed or accumulated see one scale. Layers in
// eval() record nothing, and neither do passes without gradients (NoGradGuard), as a teacher's.
//
// 8-bit products need sizes that are multiples of 16: calls with others run in 16 bits, and are counted.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/module.h>

#include <pacer/kernels/gradient_check.h>
#include <pacer/modules/fp8_options.h>

namespace pacer {

namespace detail {
class Fp8Layer;
class Fp8Tensors;
}  // namespace detail

class Fp8Scaling {
 public:
  // Scales the pacer::modules::Linear in `model`, which must be on the device where it trains. Those with
  // weights in 4 bits take part only with Fp8Options::quantized_weights. `device`: that device, where layers
  // may have no values here because other ranks have them (Pipeline), which take part wherever they are;
  // unset: where the layers are. Throws InvalidArgument for options out of range, for a model that has none,
  // and for layers on several devices, Unavailable for a GPU without 8-bit products (compute capability below
  // 8.9).
  explicit Fp8Scaling(torch::nn::Module& model, const Fp8Options& options = {},
                      std::optional<at::Device> device = std::nullopt);
  Fp8Scaling(const Fp8Scaling&) = delete;
  ~Fp8Scaling();

  const Fp8Options& options() const { return options_; }
  // How many layers compute in 8-bit floats.
  size_t layers() const { return layers_.size(); }
  // How many of their calls ran in 16 bits, because of sizes or dtypes, so far.
  int64_t other_calls() const;

  // The largest magnitudes since the last update, as bits: int32 [n], on the device; empty with current
  // scaling. Ranks that train together give all of them the maximum before update().
  at::Tensor amax() const;
  void set_amax(const at::Tensor& amax);
  // Ends a step: scales follow the largest magnitudes. Where `check` (on the device; null: none) says that
  // the step was skipped, these are forgotten. Weights are cast anew in the next pass.
  void update(const kernels::GradientCheck* check = nullptr);
  // Forgets the largest magnitudes since the last update, and the weights.
  void forget();
  // Forgets the largest magnitudes since mark() was called, or where it was not called since the last update,
  // since then: a pass that turns out to count for nothing leaves no trace.
  void mark();
  void forget_since_mark();
  // While it is off, no pass is recorded, neither forward nor backward.
  void record(bool on);
  // Whether 8-bit weights (2 bytes an element) stay from forward to backward and over the passes of a step;
  // they do at first, but for weights in 4 bits. False is for parameters that come and go.
  void keep_weights(bool keep);

  // For checkpoints, on the CPU: of each tensor with a history "LAYER.input.scale" and "LAYER.input.history",
  // "LAYER.gradient.scale" and "LAYER.gradient.history".
  std::map<std::string, at::Tensor> state() const;
  // Histories may be shorter or longer than amax_history. Throws InvalidArgument, changing nothing, where a
  // layer is missing or has what no scale can be.
  void set_state(const std::map<std::string, at::Tensor>& state);

  // How this layer computes; null for one that is not among those of the model.
  c10::intrusive_ptr<detail::Fp8Layer> layer_of(const torch::nn::Module& module) const;

 private:
  Fp8Options options_;
  std::shared_ptr<detail::Fp8Tensors> tensors_;
  std::unordered_map<const torch::nn::Module*, c10::intrusive_ptr<detail::Fp8Layer>> layers_;
};

// While it lives, layers of the model compute in 8-bit floats, on this thread. Null: none do.
class Fp8Scope {
 public:
  explicit Fp8Scope(std::shared_ptr<Fp8Scaling> scaling);
  Fp8Scope(const Fp8Scope&) = delete;
  ~Fp8Scope();

  // The scaling of this thread's innermost scope; null outside of all scopes.
  static const std::shared_ptr<Fp8Scaling>& current();
  // Sets it without a scope, for callers that restore it themselves.
  static void set_current(std::shared_ptr<Fp8Scaling> scaling);

 private:
  std::shared_ptr<Fp8Scaling> before_;
};

}  // namespace pacer
