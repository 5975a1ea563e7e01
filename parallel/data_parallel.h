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

#include <pacer/collectives/gradient_bucketer.h>
#include <pacer/core/option.h>
#include <pacer/parallel/parallel_training.h>

namespace pacer {

struct DataParallelOptions {
 private:
  BucketOptions buckets_;

 public:
  DataParallelOptions() = default;
  const BucketOptions& buckets() const { return buckets_; }

  PACER_OPTION_OF(DataParallelOptions, buckets_, bucket_bytes);
  PACER_OPTION_OF(DataParallelOptions, buckets_, first_bucket_bytes);
  PACER_OPTION_OF(DataParallelOptions, buckets_, wire_dtype);
  PACER_OPTION_OF(DataParallelOptions, buckets_, unused_is_zero);
  PACER_OPTION_OF(DataParallelOptions, buckets_, in_place);

  TORCH_ARG(InitialParameters, initial_parameters) = InitialParameters::broadcast;
  // Buffers that training changes are rank 0's on all ranks after every step, from the first in which one of
  // them changes on: those that LibTorch's operators write to, and running_mean and running_var of modules
  // that train.
  TORCH_ARG(bool, sync_buffers) = true;
};

class DataParallel : public GradientExchange {
 public:
  explicit DataParallel(DataParallelOptions options = {})
      : GradientExchange(options.initial_parameters(), options.sync_buffers(), options.unused_is_zero()),
        options_(options) {}

  std::string hook_name() const override { return "data_parallel"; }
  std::string agreement() const override;
  // The order of the buckets, on which the order of sums may depend.
  void save(NamedTensors& state) const override;
  void load(const NamedTensors& state) override;

  // Null before the first begin() and in a world of one rank.
  const GradientBucketer* bucketer() const { return bucketer_.get(); }

 private:
  double join() override;
  void begin_pass(const Progress& progress, bool is_last) override;
  void end_pass(bool is_last) override;
  void reduce(const Progress& window) override;
  void wait() override { bucketer_->wait(); }
  void drop() override { bucketer_->drop(); }

  DataParallelOptions options_;
  std::unique_ptr<GradientBucketer> bucketer_;
  std::vector<int64_t> saved_order_;  // of the checkpoint that the run goes on from
};

}  // namespace pacer
