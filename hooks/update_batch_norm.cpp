#include <pacer/hooks/update_batch_norm.h>

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/batchnorm.h>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/evaluation_scope.h>
#include <pacer/hooks/hook.h>
#include <pacer/modules/detail/model_modules.h>
#include <pacer/modules/sync_batch_norm.h>

namespace pacer {
namespace {

// One batch norm, whose statistics are a mean over batches until the end.
struct Measured {
  std::string name;
  std::optional<double>* momentum;
  std::optional<double> momentum_before;
  std::vector<at::Tensor> statistics, before;  // mean, variance, batches
};

template <class BatchNorm>
bool add(const std::string& name, torch::nn::Module& module, std::vector<Measured>& all) {
  auto* layer = module.as<BatchNorm>();
  if (layer == nullptr) return false;
  if (!layer->running_mean.defined()) return true;
  Measured measured{name, &layer->options.momentum(), layer->options.momentum(), {}, {}};
  measured.statistics = {layer->running_mean, layer->running_var, layer->num_batches_tracked};
  for (const at::Tensor& tensor : measured.statistics) measured.before.push_back(tensor.clone());
  all.push_back(std::move(measured));
  return true;
}

std::vector<Measured> batch_norms(torch::nn::Module& model) {
  std::vector<Measured> all;
  for (const auto& item : detail::named_modules_of(model)) {
    torch::nn::Module& module = *item.value();
    static_cast<void>(add<torch::nn::BatchNorm1dImpl>(item.key(), module, all) ||
                      add<torch::nn::BatchNorm2dImpl>(item.key(), module, all) ||
                      add<torch::nn::BatchNorm3dImpl>(item.key(), module, all) ||
                      add<modules::SyncBatchNormImpl>(item.key(), module, all));
  }
  return all;
}

}  // namespace

void update_batch_norm(torch::nn::Module& model, const std::function<void()>& passes) {
  require(passes != nullptr, "update_batch_norm needs a function that runs the model; it is empty");
  const at::NoGradGuard no_grad;
  std::vector<Measured> layers = batch_norms(model);
  if (layers.empty()) return;
  const detail::ModesPutBack modes(model);
  model.train();
  for (Measured& layer : layers) {
    *layer.momentum = std::nullopt;  // LibTorch's word for a mean over all batches
    layer.statistics[0].zero_();
    layer.statistics[1].fill_(1);
    layer.statistics[2].zero_();
  }
  const auto put_back_momentum = [&] {
    for (Measured& layer : layers) *layer.momentum = layer.momentum_before;
  };
  try {
    passes();
    for (const Measured& layer : layers) {
      require(layer.statistics[2].item<int64_t>() > 0,
              "update_batch_norm: no batch went through the batch norm ", layer.name,
              "; run the whole model on at least one batch of training data");
    }
  } catch (...) {
    put_back_momentum();
    for (Measured& layer : layers) {
      for (size_t i = 0; i < layer.statistics.size(); ++i) layer.statistics[i].copy_(layer.before[i]);
    }
    throw;
  }
  put_back_momentum();
}

}  // namespace pacer
