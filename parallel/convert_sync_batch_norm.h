// Batch norms whose statistics are those of the whole batch, over all ranks, as torch.nn.SyncBatchNorm:
//
//   auto world = pacer::Communicator::from_environment();
//   Model model;                                       // with pacer::modules::SyncBatchNorm, or torch's in a Sequential
//   pacer::convert_sync_batch_norm(*model, world);     // before the optimizer and the Session
//
// Parameters and buffers stay what they are, and so do their names: files of weights and checkpoints of a model before
// and after it are the same.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <pacer/collectives/communicator.h>

namespace pacer {

// Joins every batch norm of the model over the ranks of `world`, and returns their names. A
// pacer::modules::SyncBatchNorm takes part from now on. A torch::nn::BatchNorm1d, 2d or 3d in a torch::nn::Sequential
// is replaced by one that has its tensors; a handle to the former one goes on computing by itself. All ranks call this
// with the same model. In train(), each forward pass of such a layer is then an all_gather of 2 C + 1 numbers, and each
// backward pass an all_reduce of 2 C, which all ranks must come to in the same order. They travel in a lane of `world`
// of their own ("batch norm"), and hold up nothing else there.
//
// Throws InvalidArgument, on all ranks, where one of them has a batch norm of torch elsewhere, which the module that
// holds it would go on calling, and CommunicationError where ranks have different ones; no model has changed then.
std::vector<std::string> convert_sync_batch_norm(torch::nn::Module& model,
                                                 std::shared_ptr<Communicator> world);

}  // namespace pacer
