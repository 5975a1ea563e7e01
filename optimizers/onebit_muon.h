// 1-bit Muon: Muon (muon.h) whose ranks send each other signs, from the first step on, with no warm-up and no
// freeze. Each hidden matrix has a momentum on every rank, of that rank's own gradients; everything else takes
// AdamW with gradients that are averaged over the ranks.
//
//   auto world = pacer::Communicator::from_environment();
//   const auto options = pacer::OneBitMuonOptions(3e-4).weight_decay(0.1);
//   pacer::OneBitMuon optimizer(pacer::muon_groups(*model, options), options, world);
//
//   every rank:   m = m + (1 - momentum) (g - m)     u as in Muon; m and g are this rank's own
//                 d = u made orthogonal
//                 D = mean over ranks of d, which travels as signs with error feedback on both sides
//                     (compressed_all_reduce.h)
//   all ranks:    o = D made orthogonal once more
//                 p as in Muon, with o
//
// Numbers in an orthogonal matrix have nearly one size, so that a sign loses little of them. Of a matrix 1 bit an
// element travels each way instead of 32, and 1.6 % more for scales. With a single rank, or a single node that is
// hierarchical, this is Muon, to the bit, unless compress_alone(true).
//
// With a Session, add DataParallel: it leaves the gradients of matrices where they are and averages all others.
// Without, step() does that, and compares first what ranks are about to do. Gradients that are not finite on any
// rank change nothing on all of them. A matrix without a gradient on a rank counts there as one whose gradient is
// zero; one with requires_grad off stays as it is. Clipping uses one factor for all ranks, as OneBitAdam does.
//
// The list of matrices, their shapes and dtypes are fixed from the first step on. Momentum and errors are each
// rank's own: checkpoints of a Session hold them by rank. With another number of ranks each begins with the mean
// of all momentum and of all worker errors. Shards and Pipeline refuse it.
//
// Source: none that we know of; docs/onebit-muon.md says how it was found, and what it costs in loss.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pacer/optimizers/fused_optimizer.h>
#include <pacer/optimizers/muon.h>
#include <pacer/optimizers/muon_options.h>

namespace pacer {

class Communicator;

namespace detail {
class DirectionExchange;
class StepAcrossRanks;
struct GroupSettings;
}  // namespace detail

class OneBitMuon : public FusedOptimizer {
 public:
  // Parameters come as they are or in groups, with or without names, the same with the same options on all
  // ranks. `world` joins the ranks that train together; null: a single rank, refused in a process that is one
  // of several. Throws InvalidArgument for options that differ in what must be the same in all groups.
  explicit OneBitMuon(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      OneBitMuonOptions defaults = {}, std::shared_ptr<Communicator> world = nullptr);
  explicit OneBitMuon(const std::vector<NamedParamGroup>& groups, OneBitMuonOptions defaults = {},
                      std::shared_ptr<Communicator> world = nullptr);
  explicit OneBitMuon(std::vector<torch::Tensor> parameters, OneBitMuonOptions defaults = {},
                      std::shared_ptr<Communicator> world = nullptr);
  explicit OneBitMuon(const NamedParameters& parameters, OneBitMuonOptions defaults = {},
                      std::shared_ptr<Communicator> world = nullptr);
  ~OneBitMuon() override;

  // The bytes that this rank sent to others as signs. Gradients that are averaged are in the Communicator's
  // traffic().
  int64_t bytes_sent() const;

  void name_parameters(const NamedParameters& names) override;

  // The state that all ranks have: all but the momentum of matrices. Both exports throw Error after a step that
  // failed half-way: load a checkpoint then.
  NamedTensors export_state() const override;
  // This rank's momentum of matrices, and its two errors.
  NamedTensors export_rank_state() const override;

  // Archives of one file cannot hold what each rank has of its own: where there are several, both throw
  // InvalidArgument. Use the Session's Checkpoints, or export_state and export_rank_state.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  void prepare(const StepInputs& inputs) override;
  bool enqueue() override;
  void conclude(bool applied) override;
  std::vector<torch::Tensor> local_parameters() const override;
  GradientScope gradient_scope() const override;
  void check_run(const Communicator& world, const RunPlan& run) const override;
  std::string unshared_reason(GradientScope among) const override;
  bool fits_rank_state(const NamedTensors& state, const NamedTensors& rank_state) const override;
  NamedTensors join_rank_states(const NamedTensors& state,
                                const std::vector<NamedTensors>& rank_states) const override;
  PreparedImport prepare_import(const NamedTensors& state, const NamedTensors& rank_state) override;
  StepInputs plain_step_inputs() override;
  bool has_own_ranks() const override { return true; }

 private:
  void set_up(std::shared_ptr<Communicator> world);
  // The groups' own; throws InvalidArgument where they differ in it.
  CompressionOptions compression(const std::vector<detail::GroupSettings>& settings) const;
  // Whether ranks, or nodes, send each other directions with such settings.
  bool exchanges(const std::vector<detail::GroupSettings>& settings) const;
  std::unique_ptr<detail::DirectionExchange> make_exchange(
      const std::vector<detail::GroupSettings>& settings) const;
  // Whether ranks have had different momentum and errors yet.
  bool has_rank_state() const;
  void require_intact() const;
  void require_one_file(const char* what) const;

  std::shared_ptr<Communicator> world_;
  std::unique_ptr<detail::StepAcrossRanks> across_ranks_;
  std::shared_ptr<GradientGuard> guard_;  // where no Session has one
  int64_t attempts_ = 0;
  std::string failure_;  // of a step that failed half-way; empty where none did
};

}  // namespace pacer
