// Sharded data parallelism: ranks train one model on their own parts of the data, as with DataParallel, but
// each updates only a W-th of the parameters, and only that rank has its optimizer state and the sum of its
// gradients (ZeRO; Rajbhandari et al., arXiv:1910.02054, stages 1 and 2). It sends what DataParallel sends.
// Given the model's Blocks, each rank also keeps only a W-th of the parameters themselves (stage 3): those of
// a block come together before it runs, forward or backward, and leave behind it.
//
//   pacer::Session session(*model, optimizer, world);
//   session.use(pacer::Shards());                                    // state and gradients
//   session.use(pacer::Shards(pacer::ShardsOptions().what(pacer::Sharded::state)));
//   session.use(pacer::Shards(model->blocks));                       // parameters, too
//   session.use(pacer::Shards(model->blocks, pacer::ShardsOptions().over(pacer::ShardGroup::node)));
//
// Weights are those of DataParallel with ordered sums, to the bit, norms and clipping included, where
// gradients travel once a step; over nodes they are those of ordered sums inside nodes first and between them
// then. Clipping by norms of groups or of another order than 2 is equal to rounding. Where a block has frozen parameters, gradients of an argument that is used outside of it, too, as by
// the gate of a LayerDrop, add up in another order. Checkpoints hold whole tensors: any number of ranks,
// sharded or not, resumes them.
//
// Between backward and step the gradients are nowhere whole, so parameter.grad() is empty: to clip them use
// GradientClipping. The optimizer must be FusedAdam, FusedAdamW, FusedLamb, FusedSgd or FusedRmsprop; over
// nodes also a 1-bit optimizer that is hierarchical.
//
// A model that is larger than a machine need not be whole on any rank at first: see modules/deferred.h.
//
// With Blocks, from the first begin() on, a parameter has its values while its block runs, and all others
// (embeddings, head: what is in no block, or in several) between begin and the end of backward, and in
// evaluate. Whoever reads or changes one at another time gets an error that names it; in a scope of
// Session::whole_parameters() all of them are there. The model calls its blocks through Blocks::run on every
// rank alike. What a block leaves for backward must leave through its result.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/arg.h>

#include <pacer/core/option.h>
#include <pacer/hooks/sharded_state.h>
#include <pacer/modules/blocks.h>
#include <pacer/modules/deferred.h>
#include <pacer/parallel/parallel_training.h>
#include <pacer/parallel/parameter_shards.h>

namespace pacer {

namespace detail {
class BlockGathers;
}  // namespace detail
namespace modules {
struct HeadExchangeSlot;
}  // namespace modules

// What ranks keep parts of. Each value includes those before it.
enum class Sharded {
  state,       // ZeRO-1: whole gradients are kept until a step's last backward; they travel once a step
  gradients,   // ZeRO-2: parts of gradients, too; with accumulation they travel in every micro-step
  parameters,  // ZeRO-3: parts of parameters, too; needs Blocks
};

// Which ranks have parts of one whole.
enum class ShardGroup {
  world,  // all
  node,   // those of a node, so that each node has all parts: values travel inside nodes only, and between
          // them the sums of gradients, part by part, once an update. W then counts the ranks of a node.
};

struct ShardsOptions {
 private:
  ParameterShardsOptions parts_;

 public:
  ShardsOptions() = default;
  const ParameterShardsOptions& parts() const { return parts_; }

  // What each rank has a part of; with Blocks: of parameters, too.
  TORCH_ARG(Sharded, what) = Sharded::gradients;
  // node needs as many ranks on each; see CommunicatorOptions::ranks_per_node.
  TORCH_ARG(ShardGroup, over) = ShardGroup::world;
  // See ParameterShardsOptions; it is used only without Blocks.
  PACER_OPTION_OF(ShardsOptions, parts_, unit_bytes);
  // With Blocks: how many blocks are on their way while one runs, >= 0. Each costs its memory.
  TORCH_ARG(int64_t, prefetch) = 1;
  // With Blocks: blocks stay whole from forward to backward, and over the micro-steps of a step, so that each
  // is gathered once a step. The memory of all parameters, for a third fewer bytes.
  PACER_OPTION_OF(ShardsOptions, parts_, keep_after_forward);
  // With Blocks: the head's weight is never gathered: each rank makes the logits of its rows of it, for the hidden states of all
  // ranks, which travel in its place, and adds up their gradients itself. It saves memory of twice the weight, and bytes where
  // the vocabulary is larger than the rows of hidden states of all ranks together. The model must be a modules::WithHead that
  // makes its loss with head_loss(), as CausalLm does, with a head that is not tied; logits are to be had in a scope of
  // Session::whole_parameters() only. Losses are equal to rounding, not to the bit.
  TORCH_ARG(bool, split_head) = false;
  // With Blocks that defer_initialization left without memory: gives values to one block after the other before the first step,
  // on every rank; see modules/deferred.h and checkpoints/load_blocks.h. Ranks then take over rank 0's values of the block, or
  // compare them, as `initial_parameters` says, and keep their parts, so that one block is whole at a time. It is not called for
  // a block whose values come from a checkpoint.
  TORCH_ARG(MaterializeBlock, materialize);
  // With Blocks: false: whole gradients are kept until a step's last backward and travel once a step.
  TORCH_ARG(bool, reduce_every_micro_step) = true;
  // See DataParallelOptions.
  PACER_OPTION_OF(ShardsOptions, parts_, unused_is_zero);
  TORCH_ARG(InitialParameters, initial_parameters) = InitialParameters::broadcast;
  TORCH_ARG(bool, sync_buffers) = true;
};

class Shards : public GradientExchange, public ShardedState {
 public:
  explicit Shards(ShardsOptions options = {}) : Shards(std::vector<Blocks>(), options) {}
  explicit Shards(const Blocks& blocks, ShardsOptions options = {})
      : Shards(std::vector<Blocks>{blocks}, options) {}
  // For a model of several stacks.
  explicit Shards(std::vector<Blocks> stacks, ShardsOptions options = {});
  Shards(Shards&&) noexcept = default;
  ~Shards() override;

  std::string hook_name() const override { return "shards"; }
  std::string agreement() const override;
  // Throws InvalidArgument for an optimizer whose work ranks cannot share, and over nodes that differ in
  // their ranks.
  void attach(SessionParts& parts) override;
  // Parameters move into flat memory; state that the optimizer has is cut. Throws with CudaGraph,
  // and where a parameter without memory is in no block.
  void arrange() override;
  // Gives values to blocks without memory in a world of one rank; join() does in others.
  void start(const Progress& progress) override;
  void forward_begin(const Progress& progress) override;
  void forward_end() override;
  bool acts_in_forward() const override { return true; }
  void backward_begin(const Progress& progress) override;
  void after_step(StepReport& report) override;

  // See ShardedState.
  bool keeps_parts() const override { return shards_ && shards_->keeps_parts(); }
  bool shares_parameters() const override { return options_.what() == Sharded::parameters; }
  WholeParameters whole_parameters() override;
  bool all_are_whole() const override { return shards_ && shards_->all_are_gathered(); }
  ParameterRanges kept_parts() const override;
  GradientParts gradient_parts() const override;
  void run_idle_pass(const Progress& progress, const std::function<void()>& backward) override;
  void require_same_history() const override;
  NamedTensors whole_specs(NamedTensors state) const override;
  NamedTensors gather_state(NamedTensors state, const StateOwner& owner) const override;
  NamedTensors gather_model(NamedTensors model, const StateOwner& owner) const override;
  // Null in a world of one rank and before the first begin() or resume().
  const std::shared_ptr<ParameterShards>& shards() const { return shards_; }

 private:
  double join() override;
  bool sends_in_every_pass() const override;
  void begin_pass(const Progress& progress, bool is_last) override;
  void end_pass(bool is_last) override;
  void settle_missed(const Progress& window) override;
  void reduce(const Progress& window) override;
  void wait() override;
  void drop() override { shards_->drop(); }

  void choose_ranks();
  void share_out_blocks(const ParameterShardsOptions& options, const std::shared_ptr<Communicator>& replicas);
  std::vector<ParameterShards::Group> groups() const;
  std::vector<size_t> expected_groups(const Progress& progress) const;
  bool stays_local() const;
  void require_same_parameters() const;
  ParameterRanges ranges_of_step() const;
  void update_only_parts();
  void check_deferred() const;
  void materialize();
  void check_order() const;

  // A tensor of which this rank has a part, and the parameter it belongs to.
  struct SharedTensor {
    std::string name;
    size_t part;
    int64_t elements_each = 1;  // see SessionOptimizer::elements_each
  };
  std::vector<SharedTensor> shared_tensors(const NamedTensors& state) const;
  NamedTensors gather_tensors(NamedTensors tensors, const std::vector<SharedTensor>& shared,
                              const StateOwner& owner) const;
  int64_t collect(const SharedTensor& shared, int to, at::Tensor& tensor,
                  std::vector<Message>& messages) const;

  // Group 0: what is in no block, or in several.
  static constexpr size_t kRoot = 0;

  std::vector<Blocks> stacks_;
  ShardsOptions options_;
  std::shared_ptr<Communicator> ranks_;  // that have the parts of one whole
  std::shared_ptr<ParameterShards> shards_;
  std::shared_ptr<detail::BlockGathers> gathers_;         // with blocks
  std::shared_ptr<modules::HeadExchangeSlot> head_slot_;  // where the head is split by rows
  size_t head_group_ = kRoot;                             // and its number
  std::vector<at::Tensor> trained_;                       // when they were shared out
  std::vector<char> sits_out_;  // by part: has no gradient in this step; empty: none does
  // Whether the end of each forward pass that runs releases the root; several run if evaluations are nested.
  std::vector<char> releases_root_;
};

}  // namespace pacer
