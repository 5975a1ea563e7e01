// Sharded data parallelism: ranks train one model on their own parts of the data, as with DataParallel, but
// each updates only a W-th of the parameters, and only that rank has its optimizer state and the sum of its
// gradients (ZeRO; Rajbhandari et al., arXiv:1910.02054, stages 1 and 2). It sends what DataParallel sends.
//
//   pacer::Session session(*model, optimizer, world);
//   session.use(pacer::Shards());                                    // state and gradients
//   session.use(pacer::Shards(pacer::ShardsOptions().what(pacer::Sharded::state)));
//
// Weights are those of DataParallel with ordered sums, to the bit, where gradients travel once a step and
// nothing clips; a norm is added up part by part, so that its last digits in fp32 may differ, and with them
// the factor of clipping. Checkpoints hold whole tensors: any number of ranks, sharded or not, resumes them.
//
// Between backward and step the gradients are nowhere whole, so parameter.grad() is empty: to clip them use
// GradientClipping. The optimizer must be FusedAdam or FusedAdamW.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/arg.h>

#include <pacer/schedulers/joined_ranks.h>
#include <pacer/sharding/parameter_shards.h>

namespace pacer {

enum class Sharded {
  state,      // ZeRO-1: whole gradients are kept until a step's last backward; they travel once a step
  gradients,  // ZeRO-2: parts of gradients, too; with accumulation they travel in every micro-step
};

struct ShardsOptions {
  ShardsOptions() = default;
  // What each rank has a part of.
  TORCH_ARG(Sharded, what) = Sharded::gradients;
  // As in ParameterShardsOptions.
  TORCH_ARG(int64_t, unit_bytes) = ParameterShardsOptions().unit_bytes();
  // As in DataParallelOptions.
  TORCH_ARG(bool, unused_is_zero) = false;
  TORCH_ARG(InitialParameters, initial_parameters) = InitialParameters::broadcast;
  TORCH_ARG(bool, sync_buffers) = true;
};

class Shards : public JoinedRanks {
 public:
  explicit Shards(ShardsOptions options = {})
      : JoinedRanks(options.initial_parameters(), options.sync_buffers()), options_(options) {}

  std::string hook_name() const override { return "shards"; }
  std::string agreement() const override;
  // Throws InvalidArgument for an optimizer whose work ranks cannot share, and with CudaGraph.
  void attach(SessionParts& parts) override;
  // Parameters move into flat memory; state that the optimizer has is cut.
  void arrange() override;
  void after_step(StepReport& report) override;

  // ---- For checkpoints. `state` is the optimizer's export_state(), of which each rank has a part. ----

  // The same names with whole tensors without memory (device meta) in the place of parts.
  NamedTensors whole_outline(NamedTensors state) const;
  // The whole tensors, on the CPU, each on the rank that `owner` says; parts of them elsewhere. All ranks
  // together, with the same owners.
  using StateOwner = std::function<int(const std::string& name)>;
  NamedTensors gather_state(NamedTensors state, const StateOwner& owner) const;
  // Null in a world of one rank and before the first begin() or resume().
  const ParameterShards* shards() const { return shards_.get(); }

 private:
  bool is_joined() const override { return is_joined_; }
  void join() override;
  bool sends_in_every_pass() const override { return options_.what() == Sharded::gradients; }
  void begin_pass(const Progress& progress, bool is_last) override;
  void end_pass(bool is_last) override;
  void reduce(const Progress& window) override;
  void wait() override { shards_->wait(); }
  void drop() override { shards_->drop(); }
  double scale() const override { return shards_->scale(); }

  // A tensor of the optimizer's state, and the parameter it belongs to.
  struct SharedTensor {
    std::string name;
    size_t part;
  };
  std::vector<SharedTensor> shared_tensors(const NamedTensors& state) const;
  int64_t collect(const SharedTensor& shared, int to, at::Tensor& tensor,
                  std::vector<Message>& messages) const;

  ShardsOptions options_;
  std::unique_ptr<ParameterShards> shards_;
  bool is_joined_ = false;
};

}  // namespace pacer
