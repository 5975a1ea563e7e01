// What the options of the 1-bit optimizers share: how numbers become signs; and of OneBitAdam and OneBitLamb, when
// the variance freezes, and what is compressed. The optimizers plan with the same structs
// (detail/onebit_settings.h).
#pragma once

#include <cstdint>
#include <optional>

#include <pacer/compression/compression_options.h>
#include <pacer/core/option.h>

namespace pacer {

// How what ranks send each other becomes signs; the same in all groups. `Own` is the struct of one optimizer.
template <class Own>
struct SignOptionsOf {
 private:
  CompressionOptions compression_;

 public:
  const CompressionOptions& compression() const { return compression_; }

  // See CompressionOptions.
  PACER_OPTION_OF(Own, compression_, scale);
  // Every 2,048 elements have a scale of their own; false: one for the whole buffer, as in the papers, whose
  // small tensors are then driven by the noise of large ones.
  PACER_OPTION_OF(Own, compression_, block_scales);
  // A single rank has nothing to send, and by default its momentum is not compressed. True: it is rounded to
  // signs all the same, for tests and studies.
  PACER_OPTION_OF(Own, compression_, compress_alone);
  // Each node is one worker: gradients are averaged in full precision inside nodes, and signs travel between
  // nodes only, W / Communicator::ranks_per_node() instead of W workers' of them. Needs as many ranks on
  // every node. With a single node nothing is compressed.
  PACER_OPTION_OF(Own, compression_, hierarchical);
};

// When the variance of OneBitAdam and OneBitLamb freezes, and what they compress.
template <class Own>
struct OneBitOptionsOf : public SignOptionsOf<Own> {
  // False: the group stays with AdamW, or LAMB, for the whole run, and its gradients are averaged in full
  // precision. That suits parameters that are few but sensitive. What is fp64 and would be compressed must be
  // in such a group.
  PACER_OPTION(bool, compress) = true;

  // ---- Options of the optimizer: the same in all groups. ----

  // Set this or freeze_automatically. After so many steps of AdamW or LAMB (>= 1) the variance freezes and
  // compression starts.
  PACER_OPTION(std::optional<int64_t>, freeze_step);
  // The number of steps that the run takes (>= 4). The variance then freezes by itself between 15 and 30 % of
  // the run, as soon as it stands still, and not before learning-rate warm-up and curriculum have ended.
  PACER_OPTION(std::optional<int64_t>, freeze_automatically);
  // The variance may freeze although a curriculum or a learning-rate warm-up has not ended.
  PACER_OPTION(bool, allow_early_freeze) = false;
  // The least variance that an element divides by, as a share of its tensor's mean variance, in [0, 1]; 0
  // sets no floor. Without a floor, elements that had almost no gradients before the freeze turn the noise of
  // signs into steps as large as Adam's can be at all. Those that had none stay as they are while momentum
  // travels as signs, with or without a floor, until a refresh has seen a gradient.
  PACER_OPTION(double, variance_floor) = 0.01;
  // False: parameters of less than two dimensions (biases, gains of normalisations) stay in full precision in
  // compressed groups, too. They are few, and their gradients are of another size than those of matrices, or
  // noise alone: of a bias before batch norm, or of a key's.
  PACER_OPTION(bool, compress_vectors) = false;
  // False: gradients are averaged in full precision after the freeze, too. A control, which shows what the
  // frozen variance alone costs.
  PACER_OPTION(bool, one_bit) = true;
  // Momentum travels in buckets, cut in the order of the parameters: a bucket takes no more of them once it
  // has so many bytes (>= 1), counted as 4 an element. While the signs of one are on their way, the next is
  // compressed and the one before updates its parameters. Each has messages, and without block_scales scales,
  // of its own. Not part of the state: a checkpoint goes on with any. Unset: one bucket.
  PACER_OPTION(std::optional<int64_t>, bucket_bytes);
  // In a Session, a bucket's momentum is compressed and travels as soon as backward has all its gradients;
  // the step waits for what is still on its way and updates. Momentum then leaves before all gradients were
  // seen: nothing may scale the loss, or clip gradients but by the norm of the step before
  // (GradientClippingOptions::by_previous_norm), and one that is not finite is an error, after which a checkpoint
  // must be loaded, where else the step would be skipped. Not with hierarchical. Not part of the state.
  PACER_OPTION(bool, overlap_backward) = false;

 public:
  // Not offered; a compiler that meets it says why.
  template <class Any>
  Own& paged(const Any&) {
    static_assert(
        sizeof(Any) == 0,
        "1-bit optimizers need their state, and what they could not send, on the GPU in every step; "
        "leave out paged(), or use FusedAdamW or FusedLamb");
    return static_cast<Own&>(*this);
  }
};

}  // namespace pacer
