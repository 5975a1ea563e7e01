// Batch norm (Ioffe & Szegedy, arXiv:1502.03167) whose batch may lie in parts on several ranks: with the parameters,
// buffers, names and initial values of torch::nn::BatchNorm1d, 2d and 3d, and the values of torch.nn.SyncBatchNorm.
//
//   pacer::modules::SyncBatchNorm norm(64);            // where a model says torch::nn::BatchNorm2d norm(64)
//   pacer::convert_sync_batch_norm(*model, world);     // parallel/convert_sync_batch_norm.h: joins the ranks
//
// It is a plain batch norm until it has a StatisticsExchange, and whenever it does not train.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

namespace pacer::modules {

// How a layer reaches the ranks that have the other parts of its batch. All ranks make the same calls in the same
// order, those of forward passes and those of backward passes. Tensors are contiguous and on device().
class StatisticsExchange {
 public:
  virtual ~StatisticsExchange() = default;
  // The number of ranks, this one included.
  virtual int ranks() const = 0;
  virtual at::Device device() const = 0;
  // own [n] of every rank, in rank order -> [ranks(), n].
  virtual at::Tensor all_gather(const at::Tensor& own) = 0;
  // sum = its sum over ranks.
  virtual void all_reduce(const at::Tensor& sum) = 0;
  // This rank cannot go on: the others fail with this reason.
  virtual void leave(const std::string& reason) noexcept = 0;
};

// The tensors of a batch norm of C channels; undefined where its options say that there are none.
struct BatchNormTensors {
  at::Tensor weight, bias;               // [C]
  at::Tensor running_mean, running_var;  // [C]
  at::Tensor num_batches_tracked;        // int64, one number
};

class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  SyncBatchNormImpl(int64_t num_features)  // NOLINT(google-explicit-constructor): as torch::nn::BatchNorm2d
      : SyncBatchNormImpl(torch::nn::BatchNormOptions(num_features)) {}
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options);
  // The layer has these very tensors, so it goes on where another batch norm is.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const BatchNormTensors& tensors);

  void reset() override;
  // Running statistics as at first, the weight 1 and the bias 0.
  void reset_parameters();
  // A running mean of 0, a variance of 1, and no batches.
  void reset_running_stats();
  void pretty_print(std::ostream& stream) const override;

  // x [N, C] or [N, C, ...] in Float, BFloat16, Half or Double -> the same shape, dtype and memory order. In train(),
  // mean and variance are those of the rows of all ranks, which may have different numbers of them, also none; running
  // statistics move on with the variance that is divided by the number of values less one. In eval(), and without an
  // exchange, it is torch::nn::functional::batch_norm. Over several ranks parameters and statistics must be Float,
  // or Double for an x of Double, and there is no second derivative. InvalidArgument for other numbers of channels and
  // for fewer than two values per channel in train(), over all ranks; nothing has changed then. Where a rank throws
  // alone, the others fail, too.
  at::Tensor forward(const at::Tensor& x);

  // Null, as it is at first: the layer knows its own rows alone. Clones share it.
  void set_exchange(std::shared_ptr<StatisticsExchange> exchange) { exchange_ = std::move(exchange); }
  const std::shared_ptr<StatisticsExchange>& exchange() const { return exchange_; }

  // Its eps and momentum may change at any time. Without a value of momentum, running statistics are means over all
  // batches.
  torch::nn::BatchNormOptions options;
  at::Tensor weight, bias;
  at::Tensor running_mean, running_var, num_batches_tracked;

 private:
  void take(const BatchNormTensors& tensors, bool weight_is_frozen, bool bias_is_frozen);
  void check(const at::Tensor& x) const;
  void check_parts(const at::Tensor& x) const;
  double count_batch();
  at::Tensor forward_alone(const at::Tensor& x, bool uses_batch);
  at::Tensor forward_together(const at::Tensor& x);

  std::shared_ptr<StatisticsExchange> exchange_;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace pacer::modules
