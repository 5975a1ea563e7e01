// Options of OneBitAdam. Setters chain:
// OneBitAdamOptions(1e-3).freeze_step(2'000).refresh_variance_every(32).
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <pacer/kernels/choices.h>
#include <pacer/optimizers/adam_options.h>

namespace pacer {

// 1-bit Adam (Tang et al., arXiv:2102.02888), with decoupled weight decay.
struct OneBitAdamOptions : public torch::optim::OptimizerCloneableOptions<OneBitAdamOptions> {
  using betas_t = std::tuple<double, double>;

  OneBitAdamOptions(double learning_rate = 1e-3) : lr_(learning_rate) {}

  // ---- Options of a parameter group: each as in FusedAdamWOptions. ----
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;

 private:
  // Lies where torch's options have amsgrad, which this rule does not have: set through a cast, it is
  // refused.
  bool amsgrad_ = false;

 public:
  bool wants_amsgrad() const { return amsgrad_; }
  TORCH_ARG(std::optional<double>, initial_lr);
  TORCH_ARG(bool, bias_correction) = true;
  // 16-bit parameters need a master copy or a remainder: MasterWeights::none is refused.
  TORCH_ARG(MasterWeights, master_weights) = MasterWeights::automatic;
  // False: the group stays with AdamW for the whole run, and its gradients are averaged in full precision.
  // That suits parameters that are few but sensitive. What is fp64 and would be compressed must be in such a
  // group.
  TORCH_ARG(bool, compress) = true;

  // ---- Options of the optimizer: the same in all groups. ----

  // Set this or freeze_automatically. After so many steps of AdamW (>= 1) the variance freezes and
  // compression starts.
  TORCH_ARG(std::optional<int64_t>, freeze_step);
  // The number of steps that the run takes (>= 4). The variance then freezes by itself between 15 and 30 % of
  // the run, as soon as it stands still, and not before learning-rate warm-up and curriculum have ended.
  TORCH_ARG(std::optional<int64_t>, freeze_automatically);
  // The variance may freeze although a curriculum or a learning-rate warm-up has not ended.
  TORCH_ARG(bool, allow_early_freeze) = false;
  // Every K-th step after the freeze travels in full precision and brings the variance up to date; 0: never.
  TORCH_ARG(int64_t, refresh_variance_every) = 0;
  // The least variance that an element divides by, as a share of its tensor's mean variance, in [0, 1]; 0
  // sets no floor. Without a floor, elements that had almost no gradients before the freeze turn the noise of
  // signs into steps as large as Adam's can be at all. Those that had none stay as they are while momentum
  // travels as signs, with or without a floor, until a refresh has seen a gradient.
  TORCH_ARG(double, variance_floor) = 0.01;
  // What a sign stands for; see CompressionOptions.
  TORCH_ARG(ScaleNorm, scale) = ScaleNorm::rms;
  // Every 2,048 elements have a scale of their own; false: one for the whole buffer, as in the paper, whose
  // small tensors are then driven by the noise of large ones.
  TORCH_ARG(bool, block_scales) = true;
  // False: parameters of less than two dimensions (biases, gains of normalisations) stay in full precision in
  // compressed groups, too. They are few, and their gradients are of another size than those of matrices, or
  // noise alone: of a bias before batch norm, or of a key's.
  TORCH_ARG(bool, compress_vectors) = false;
  // A single rank has nothing to send, and by default its momentum is not compressed. True: it is rounded to
  // signs all the same, for tests and studies.
  TORCH_ARG(bool, compress_alone) = false;
  // Each node is one worker: gradients are averaged in full precision inside nodes, and signs travel between
  // nodes only, W / Communicator::ranks_per_node() instead of W workers' of them. Needs as many ranks on
  // every node. With a single node nothing is compressed.
  TORCH_ARG(bool, hierarchical) = false;
  // False: gradients are averaged in full precision after the freeze, too. A control, which shows what the
  // frozen variance alone costs.
  TORCH_ARG(bool, one_bit) = true;
  // Momentum travels in buckets, cut in the order of the parameters: a bucket takes no more of them once it
  // has so many bytes (>= 1), counted as 4 an element. While the signs of one are on their way, the next is
  // compressed and the one before updates its parameters. Each has messages, and without block_scales scales,
  // of its own. Not part of the state: a checkpoint goes on with any. Unset: one bucket.
  TORCH_ARG(std::optional<int64_t>, bucket_bytes);
  // In a Session, a bucket's momentum is compressed and travels as soon as backward has all its gradients;
  // the step waits for what is still on its way and updates. Momentum then leaves before all gradients were
  // seen: nothing may scale the loss, or clip gradients but by the norm of the step before
  // (GradientClipping::by_previous_norm), and one that is not finite is an error, after which a checkpoint
  // must be loaded, where else the step would be skipped. Not with hierarchical. Not part of the state.
  TORCH_ARG(bool, overlap_backward) = false;

 public:
  // Not offered; a compiler that meets it says why.
  template <class Any>
  OneBitAdamOptions& paged(const Any&) {
    static_assert(
        sizeof(Any) == 0,
        "1-bit optimizers need their state, and what they could not send, on the GPU in every step; "
        "leave out paged(), or use FusedAdamW or FusedLamb");
    return *this;
  }

  double get_lr() const override { return lr(); }
  void set_lr(double learning_rate) override { lr(learning_rate); }
};

bool operator==(const OneBitAdamOptions& left, const OneBitAdamOptions& right);

}  // namespace pacer
