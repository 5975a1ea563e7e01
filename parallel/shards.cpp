#include <pacer/parallel/shards.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include <pacer/collectives/detail/gradient_checks.h>
#include <pacer/core/error.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/parallel/detail/block_gathers.h>
#include <pacer/parallel/detail/sharded_head.h>

namespace pacer {
namespace {

const char* name_of(Sharded what) {
  constexpr const char* kNames[] = {"state", "state and gradients", "state, gradients and parameters"};
  return kNames[static_cast<size_t>(what)];
}

}  // namespace

Shards::Shards(std::vector<Blocks> stacks, ShardsOptions options)
    : GradientExchange(options.initial_parameters(), options.sync_buffers(), options.unused_is_zero()),
      stacks_(std::move(stacks)),
      options_(options) {
  const bool has_blocks = !stacks_.empty();
  for (const Blocks& blocks : stacks_) {
    require(!blocks.is_empty() && blocks->size() > 0,
            "Shards was given Blocks without a block; add the blocks before it is made");
  }
  require(options_.prefetch() >= 0, "ShardsOptions::prefetch must be at least 0, not ", options_.prefetch());
  require(has_blocks || options_.what() != Sharded::parameters,
          "Shards shares out parameters block by block; give it the model's: Shards(model->blocks)");
  require(!has_blocks || options_.what() != Sharded::state,
          "Shards with Blocks has parts of state, gradients and parameters; leave out the Blocks, or "
          "ShardsOptions::what (reduce_every_micro_step(false) keeps whole gradients between micro-steps)");
  const ShardsOptions defaults;
  require(has_blocks || (options_.prefetch() == defaults.prefetch() && !options_.keep_after_forward() &&
                         options_.reduce_every_micro_step()),
          "prefetch, keep_after_forward and reduce_every_micro_step are about parameters that come and go; "
          "give Shards the model's Blocks, or leave them out (Sharded::state reduces once a step)");
  require(!has_blocks || options_.unit_bytes() == defaults.unit_bytes(),
          "with Blocks each block is a unit; leave ShardsOptions::unit_bytes out");
  require(has_blocks || !options_.split_head(),
          "ShardsOptions::split_head is about parameters that come and go; give Shards the model's Blocks, "
          "or leave it out");
  require(
      has_blocks || !options_.materialize(),
      "ShardsOptions::materialize gives values to blocks without memory; give Shards the model's Blocks, or "
      "leave it out");
  if (has_blocks) options_.what(Sharded::parameters);
}

Shards::~Shards() {
  if (head_slot_ != nullptr) head_slot_->exchange = nullptr;
  if (!gathers_) return;
  for (Blocks& blocks : stacks_) blocks->unwrap(WrapperLevel::gather);
}

std::string Shards::agreement() const {
  std::string text = detail::concatenate("parts of ", name_of(options_.what()),
                                         options_.over() == ShardGroup::node ? " on each node" : "",
                                         ", units of ", options_.unit_bytes(), " bytes, unused parameters ",
                                         options_.unused_is_zero() ? "are zero" : "are an error");
  if (stacks_.empty()) return text;
  text += detail::concatenate(", ", options_.prefetch(), " blocks ahead",
                              options_.keep_after_forward() ? ", kept after forward" : "",
                              options_.reduce_every_micro_step() ? "" : ", reduced once a step",
                              options_.split_head() ? ", the head by rows" : "", ", stacks of");
  size_t deferred = 0;
  for (const Blocks& blocks : stacks_) {
    text += detail::concatenate(' ', blocks->size());
    for (const auto& block : *blocks) {
      const std::vector<at::Tensor> parameters = block->parameters();
      deferred += std::any_of(parameters.begin(), parameters.end(), is_deferred) ? 1 : 0;
    }
  }
  if (deferred > 0) text += detail::concatenate(", ", deferred, " of them without values");
  return text;
}

bool Shards::sends_in_every_pass() const {
  return options_.what() != Sharded::state && options_.reduce_every_micro_step();
}

ParameterRanges Shards::ranges_of_step() const {
  ParameterRanges ranges;
  for (size_t i = 0; i < shards_->parts().size(); ++i) {
    const ParameterShards::Part& part = shards_->parts()[i];
    ParameterRange& range = ranges[part.parameter.unsafeGetTensorImpl()];
    range = static_cast<const ParameterRange&>(part);
    if (!sits_out_.empty() && sits_out_[i] != 0) range.gradient = at::Tensor();
  }
  return ranges;
}

void Shards::update_only_parts() { parts().session_optimizer()->update_only(ranges_of_step(), ranks_); }

ShardedState::GradientParts Shards::gradient_parts() const {
  return is_joined() ? GradientParts{ranges_of_step(), ranks_} : GradientParts{};
}

void Shards::require_same_parameters() const {
  require(
      detail::are_trained(trained_, parts().optimizer().param_groups()),
      "parameters were frozen, unfrozen or added after Shards had shared them out; do so before the first "
      "begin or resume, or save a checkpoint and resume from it in a new Session");
}

double Shards::join() {
  require_same_parameters();
  if (gathers_ && !keeps_parts()) {
    materialize();
    shards_->keep_parts();
    update_only_parts();
  }
  return shards_->scale();
}

void Shards::forward_begin(const Progress& progress) {
  GradientExchange::forward_begin(progress);
  if (!keeps_parts()) return;
  const bool trains = parts().evaluations == 0;
  require(!trains || !shards_->all_are_gathered(),
          "training goes on while what Session::whole_parameters() returned still exists; end its scope "
          "before begin");
  const bool was_there = shards_->is_gathered(kRoot);
  shards_->gather(kRoot);
  releases_root_.push_back(!trains && !was_there);
  gathers_->begin_forward(expected_groups(progress));
}

void Shards::backward_begin(const Progress& progress) {
  if (is_joined()) require_same_parameters();
  GradientExchange::backward_begin(progress);
}

// What no pass of the window has reached on any rank is no part of the step, as with whole gradients. What a
// hook says to be unused has a gradient of zero.
void Shards::settle_missed(const Progress& window) {
  if (!parts().session_optimizer()->local_parameters().empty()) return;
  std::vector<char> missed = shards_->missed();
  if (!options_.unused_is_zero() && std::count(missed.begin(), missed.end(), 1) == 0) return;
  const std::vector<ParameterShards::Part>& all = shards_->parts();
  std::unordered_set<const void*> zero;
  for (const at::Tensor& parameter : parts().unused(window)) zero.insert(parameter.unsafeGetTensorImpl());
  std::vector<std::string> names;
  for (size_t i = 0; i < missed.size(); ++i) {
    if (missed[i] != 0 && zero.count(all[i].parameter.unsafeGetTensorImpl()) != 0) missed[i] = 0;
    if (missed[i] != 0) names.push_back(all[i].name);
  }
  if (!options_.unused_is_zero()) return detail::require_all_reached(names, missed.size());
  const std::vector<std::string> of_ranks =
      parts().world().exchange(std::string(missed.begin(), missed.end()));
  for (const std::string& of_rank : of_ranks) {
    for (size_t i = 0; i < missed.size(); ++i) missed[i] = missed[i] != 0 && of_rank[i] != 0 ? 1 : 0;
  }
  if (missed == sits_out_ || (sits_out_.empty() && std::count(missed.begin(), missed.end(), 1) == 0)) return;
  sits_out_ = std::move(missed);
  update_only_parts();
}

// In training the root stays for backward.
void Shards::forward_end() {
  GradientExchange::forward_end();
  if (releases_root_.empty()) return;
  if (releases_root_.back()) shards_->release(kRoot);
  releases_root_.pop_back();
}

// Those of blocks that are not dropped.
std::vector<size_t> Shards::expected_groups(const Progress& progress) const {
  std::unordered_set<const void*> dropped;
  if (parts().model().is_training()) {
    Progress this_one = progress;
    this_one.micro_steps = progress.micro_step + 1;
    for (const at::Tensor& parameter : parts().unused(this_one)) {
      dropped.insert(parameter.unsafeGetTensorImpl());
    }
  }
  std::vector<size_t> expected;
  for (const ParameterShards::Part& part : shards_->parts()) {
    if (part.group == kRoot || part.group == head_group_ ||
        dropped.count(part.parameter.unsafeGetTensorImpl()) != 0)
      continue;
    if (expected.empty() || expected.back() != part.group) expected.push_back(part.group);
  }
  return expected;
}

void Shards::begin_pass(const Progress& progress, bool is_last) {
  ParameterShards::Pass pass;
  pass.is_last = is_last;
  Progress window = progress, this_one = progress;
  window.micro_step = 0;
  this_one.micro_steps = progress.micro_step + 1;
  pass.absent = parts().unused(this_one);
  if (is_last) pass.absent_in_all = parts().unused(window);
  pass.stays_local = stays_local();
  check_order();
  shards_->begin_backward(pass);
  if (gathers_) gathers_->begin_backward();
}

// Backward gathers blocks in the reverse of the order in which forward ran them, which is the model's.
void Shards::check_order() const {
  if (!keeps_parts()) return;
  std::vector<int64_t> numbers;
  for (const size_t group : gathers_->used()) {
    if (gathers_->has_parameters(group)) numbers.push_back(static_cast<int64_t>(group));
  }
  require_agreement(parts().world(), parts().progress.step, numbers, [this] {
    std::vector<Fact> order;
    for (const size_t group : gathers_->used()) {
      order.push_back({detail::concatenate("block run number ", order.size()), shards_->group_name(group)});
    }
    return order;
  });
}

void Shards::run_idle_pass(const Progress& progress, const std::function<void()>& backward) {
  if (!is_joined()) return backward();
  try {
    begin_pass(progress, /*is_last=*/true);
    backward();
    shards_->end_backward();
    wait();
  } catch (const std::exception& error) {
    shards_->drop();
    parts().world().leave(detail::concatenate("prewarm failed: ", error.what()));
    throw;
  }
  shards_->drop();
}

void Shards::end_pass(bool /*is_last*/) { shards_->end_backward(); }

void Shards::reduce(const Progress& window) {
  require_same_parameters();
  shards_->reduce(parts().unused(window), stays_local());
}

// A 1-bit optimizer's nodes then exchange something else.
bool Shards::stays_local() const {
  return parts().session_optimizer()->gradient_scope() != GradientScope::world;
}

// Ranks that took different ways through the model have gathered the wrong blocks, and added up gradients of
// different ones.
void Shards::wait() {
  if (keeps_parts()) require_same_history();
  shards_->wait();
}

void Shards::require_same_history() const {
  const std::vector<ParameterShards::Operation> history = shards_->take_history();
  std::vector<int64_t> numbers;
  for (const ParameterShards::Operation& operation : history) {
    numbers.push_back(static_cast<int64_t>(operation.kind));
    numbers.push_back(static_cast<int64_t>(operation.group));
  }
  require_agreement(parts().world(), parts().progress.step, numbers, [&] {
    std::vector<Fact> lines;
    for (const ParameterShards::Operation& operation : history) {
      lines.push_back({detail::concatenate("operation ", lines.size()), shards_->describe(operation)});
    }
    return lines;
  });
}

// Its result may outlive the hook.
WholeParameters Shards::whole_parameters() {
  if (!shards_) return WholeParameters(nullptr);
  shards_->gather_all();
  const auto release = [shards = shards_](const void*) { shards->release_all(); };
  return WholeParameters(std::shared_ptr<const void>(shards_.get(), release));
}

// Before anything of the step's new values is read: validation, checkpoints.
void Shards::after_step(StepReport& report) {
  if (is_joined()) shards_->gather_parameters();
  GradientExchange::after_step(report);
}

}  // namespace pacer
