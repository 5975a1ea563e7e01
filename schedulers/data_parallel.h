// Data parallelism: every rank trains the same model on its own part of the data, and gradients are added
// over all ranks while backward still runs (collectives/gradient_bucketer.h). All replicas stay identical to
// the bit.
//
//   auto world = pacer::Communicator::from_environment();
//   pacer::Session session(*model, optimizer, world);        // uses a DataParallel by itself
//   session.use(pacer::DataParallel(pacer::DataParallelOptions().wire_dtype(at::kBFloat16)));  // or this one
//
// At the first begin() the ranks compare names, shapes, dtypes and order of the parameters, optimizer options
// (the learning rate aside), hooks, library versions and the step; any difference is an error on every rank
// before a payload moves. Then rank 0's parameters and buffers are copied to all. In each window they also
// compare where they are: a rank that ran out of data, or left with an exception, is named in the others'
// CommunicationError.
//
// The gradient is the mean over all micro-batches of all ranks (weighted by tokens where accumulation is),
// whatever the number of ranks: keep the learning rate that fits the global batch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/arg.h>

#include <pacer/collectives/agreement.h>
#include <pacer/collectives/gradient_bucketer.h>
#include <pacer/schedulers/hook.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace pacer {

enum class InitialParameters {
  broadcast,  // all ranks take over rank 0's
  check,      // they must be equal already, to the bit
};

struct DataParallelOptions {
  DataParallelOptions() = default;
  // As in BucketOptions.
  TORCH_ARG(std::optional<int64_t>, bucket_bytes);
  TORCH_ARG(int64_t, first_bucket_bytes) = BucketOptions().first_bucket_bytes();
  TORCH_ARG(std::optional<at::ScalarType>, wire_dtype);
  TORCH_ARG(bool, unused_is_zero) = false;
  TORCH_ARG(std::optional<bool>, in_place);
  TORCH_ARG(InitialParameters, initial_parameters) = InitialParameters::broadcast;
  // Buffers that training changes are rank 0's on all ranks after every step, from the first in which one of
  // them changes on: those that LibTorch's operators write to, and running_mean and running_var of modules
  // that train.
  TORCH_ARG(bool, sync_buffers) = true;
};

class DataParallel : public Hook {
 public:
  explicit DataParallel(DataParallelOptions options = {}) : options_(std::move(options)) {}

  std::string hook_name() const override { return "data_parallel"; }
  Slot slot() const override { return Slot::reduce; }
  bool exclusive() const override { return true; }
  // Throws InvalidArgument for a Session without a Communicator, and a model on another device than its.
  void attach(SessionParts& parts) override;
  void start(const Progress& progress) override;
  void forward_begin(const Progress& progress) override;
  void backward_begin(const Progress& progress) override;
  void backward_end(const Progress& progress) override;
  void backward_failed() override;
  void gradients_ready(const Progress& window) override;
  void after_step(StepReport& report) override;
  void finish(const Progress& progress) override;
  // The order of the buckets, on which the order of sums may depend.
  void save(NamedTensors& state) const override;
  void load(const NamedTensors& state) override;

  // Null before the first begin() and in a world of one rank.
  const GradientBucketer* bucketer() const { return bucketer_.get(); }

 private:
  std::vector<Fact> facts() const;
  void join_ranks(const Progress& progress);
  void look_early();
  void share_parameters();
  void remember_buffers(const std::shared_ptr<torch::nn::Module>& owner);
  std::string changed_buffers() const;
  bool sees_new_buffers() const;
  void sync_buffers();
  void add_totals(const std::vector<RankStatus>& ranks);

  DataParallelOptions options_;
  SessionParts* parts_ = nullptr;
  std::unique_ptr<GradientBucketer> bucketer_;
  std::vector<int64_t> saved_order_;  // of the checkpoint that the run goes on from
  std::vector<at::Tensor> trained_;   // what the bucketer reduces
  StatusExchange statuses_;           // of the window under way
  struct Buffer {
    at::Tensor tensor;
    std::shared_ptr<torch::nn::Module> owner;
    bool is_statistic;  // by its name: kernels that write running statistics count no version
    int64_t version;    // before the first pass
  };
  std::vector<Buffer> buffers_;
  std::string is_changing_;      // by buffer, '0' or '1'; the same on all ranks
  bool learns_buffers_ = false;  // after this step
};

}  // namespace pacer
