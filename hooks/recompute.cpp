#include <pacer/hooks/recompute.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/submodules.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/modules/detail/operator_list.h>
#include <pacer/modules/recompute.h>

namespace pacer {

class Recompute::Wrapper : public BlockWrapper {
 public:
  Wrapper(std::vector<bool> recomputed, KeptOperators keep)
      : recomputed_(std::move(recomputed)), keep_(std::move(keep)) {}

  Tensors run(const BlockCall& call, const TensorFunction& rest, const Tensors& x) override {
    require(call.index < recomputed_.size(), "Recompute knows ", recomputed_.size(), " blocks and no block ",
            call.index, "; add all blocks before Session::use");
    was_asked_ = true;
    if (!recomputed_[call.index]) return rest(x);
    has_region_ = has_region_ || at::GradMode::is_enabled();
    return recompute_tensors(*call.block, detail::concatenate("block ", call.index), rest, x, keep_);
  }
  bool has_region() const { return has_region_; }
  bool was_asked() const { return was_asked_; }
  const std::vector<bool>& recomputed() const { return recomputed_; }

 private:
  std::vector<bool> recomputed_;  // by block
  KeptOperators keep_;
  bool was_asked_ = false, has_region_ = false;  // one with a graph
};

namespace {

std::string operators_to_keep(const KeptOperators& operators) {
  std::string text;
  for (const std::string& name : operators.names()) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

Recompute::Recompute(std::vector<Blocks> stacks, RecomputeOptions options)
    : stacks_(std::move(stacks)), options_(std::move(options)) {
  require(options_.every() >= 1, "RecomputeOptions::every must be at least 1, not ", options_.every());
  require(!stacks_.empty(), "Recompute was given no Blocks");
  for (const Blocks& blocks : stacks_) {
    require(!blocks.is_empty() && blocks->size() > 0,
            "Recompute was given Blocks without a block; add the blocks before it is made");
  }
}

Recompute::~Recompute() {
  for (size_t i = 0; i < wrappers_.size(); ++i) stacks_[i].ptr()->unwrap(WrapperLevel::recompute);
}

void Recompute::attach(SessionParts& parts) {
  parts_ = &parts;
  for (const Blocks& blocks : stacks_) detail::require_in_model(parts.model(), *blocks, "Recompute");
  for (const Blocks& blocks : stacks_) {
    std::vector<bool> recomputed(blocks->size());
    for (size_t i = 0; i < recomputed.size(); ++i) {
      recomputed[i] =
          i % static_cast<size_t>(options_.every()) == 0 && (!options_.blocks() || options_.blocks()(i));
    }
    require(std::count(recomputed.begin(), recomputed.end(), true) > 0,
            "Recompute would recompute no block; see RecomputeOptions::blocks");
    const auto wrapper = std::make_shared<Wrapper>(std::move(recomputed), options_.keep());
    blocks.ptr()->wrap(WrapperLevel::recompute, wrapper);
    wrappers_.push_back(wrapper);
  }
}

std::string Recompute::agreement() const {
  std::string text = "blocks";
  for (const auto& wrapper : wrappers_) {
    for (size_t i = 0; i < wrapper->recomputed().size(); ++i) {
      if (wrapper->recomputed()[i]) text += " " + std::to_string(i);
    }
    text += ";";
  }
  return options_.keep().empty() ? text : text + " results of " + operators_to_keep(options_.keep());
}

// Where layers are dropped, all of them may be in this micro-step; a stage of a Pipeline may have none.
void Recompute::backward_begin(const Progress& progress) {
  Progress this_one = progress;
  this_one.micro_steps = progress.micro_step + 1;
  const bool any =
      std::any_of(wrappers_.begin(), wrappers_.end(), [](const auto& w) { return w->was_asked(); });
  require<Error>(
      any || parts_->replicas || !parts_->unused(this_one).empty(),
      "forward ran no block through Blocks::run, so nothing is recomputed; in the model's forward write "
      "x = blocks->run(i, &BlockImpl::forward, x) for each block");
  const bool has_region =
      std::any_of(wrappers_.begin(), wrappers_.end(), [](const auto& w) { return w->has_region(); });
  require<Error>(
      !has_region || options_.keep().empty() || options_.keep().list()->kept > 0,
      "no recomputed block ran an operator of RecomputeOptions::keep (", operators_to_keep(options_.keep()),
      "), so nothing is kept; a profile of the block names its operators, of which those that reach a "
      "kernel count");
}

}  // namespace pacer
