// Recomputation for a stack of blocks: each block keeps only its arguments for backward and runs again there
// (pacer/modules/recompute.h says what that means, and what is refused).
//
//   session.use(pacer::Recompute(model->blocks));
//   session.use(pacer::Recompute(model->blocks, pacer::RecomputeOptions().every(2)));   // half of the blocks
//   session.use(pacer::Recompute(model->blocks, pacer::RecomputeOptions().keep(pacer::KeptOperators::attention())));
//
// Weights, moments and losses are those of plain training to the bit; gates of a LayerDrop stay outside, so a
// dropped block is not recomputed, and the gradients of a kept one add up in another order. The model calls
// its blocks through Blocks::run; any other part of a model can be recomputed with the function
// pacer::recompute.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/arg.h>

#include <pacer/hooks/hook.h>
#include <pacer/modules/blocks.h>
#include <pacer/modules/kept_operators.h>

namespace pacer {

struct RecomputeOptions {
  RecomputeOptions() = default;
  // Block i is recomputed where i is a multiple of this, >= 1, and `blocks` says so, too. Both must give the
  // same on all ranks.
  TORCH_ARG(int64_t, every) = 1;
  TORCH_ARG(std::function<bool(size_t i)>, blocks);
  // Operators whose results are kept instead of computed again (pacer/modules/kept_operators.h): less time for more
  // memory, the same numbers. All ranks must keep the same.
  TORCH_ARG(KeptOperators, keep);
};

class Recompute : public Hook {
 public:
  explicit Recompute(const Blocks& blocks, RecomputeOptions options = {})
      : Recompute(std::vector<Blocks>{blocks}, std::move(options)) {}
  // For a model of several stacks.
  explicit Recompute(std::vector<Blocks> stacks, RecomputeOptions options = {});
  Recompute(Recompute&&) noexcept = default;
  ~Recompute() override;

  std::string hook_name() const override { return "recompute"; }
  Slot slot() const override { return Slot::forward; }
  // Throws InvalidArgument for Blocks that are empty, in another Session, or no part of the model.
  void attach(SessionParts& parts) override;
  std::string agreement() const override;
  // Throws Error where forward ran no block through Blocks::run, or none of the operators to keep in a recomputed one:
  // nothing would ever be recomputed, or kept.
  void backward_begin(const Progress& progress) override;

 private:
  class Wrapper;

  std::vector<Blocks> stacks_;
  RecomputeOptions options_;
  SessionParts* parts_ = nullptr;
  std::vector<std::shared_ptr<Wrapper>> wrappers_;  // once attached
};

}  // namespace pacer
