// The running statistics of batch norms, measured anew for weights that they were not measured with, such as an
// average of weights (weight_average.h).
//
//   const auto averaged = average->in_model();
//   pacer::update_batch_norm(*model, [&] { for (auto& batch : *loader) model->forward(batch.data); });
//   pacer::save_weights(*model, "averaged.safetensors");
#pragma once

#include <functional>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace pacer {

// `passes` runs the model on batches of training data. It is called once, in training mode and without
// gradients, and every batch counts alike, as with torch.optim.swa_utils.update_bn. Dropout is on in it. The
// modes of all modules are put back after it. Where it throws, or runs no batch through one of the batch
// norms, which is an InvalidArgument, statistics are what they were. A model without BatchNorm1d, 2d or 3d or
// SyncBatchNorm that tracks statistics is left alone, and `passes` is not called. Where a SyncBatchNorm is shared by
// several ranks, all of them call this, with as many batches.
void update_batch_norm(torch::nn::Module& model, const std::function<void()>& passes);

}  // namespace pacer
