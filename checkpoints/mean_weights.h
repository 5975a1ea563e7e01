// The mean of the weights of the last checkpoints of a run (latest weight averaging; Kaddour, arXiv:2209.14981): what an
// average of weights would have been, decided after the run, or for a run that made none.
//
//   session.use(pacer::Checkpoints(pacer::CheckpointsOptions("run/checkpoints").every(500).keep(8)));
//   ...
//   pacer::load_mean_weights(*model, "run/checkpoints", 8);
//   pacer::update_batch_norm(*model, [&] { ... });  // where there are batch norms
//   pacer::save_weights(*model, "run/averaged.safetensors");
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace pacer {

// Gives the parameters of the model the mean of their values in the newest `count` checkpoints of the folder that verify, all
// alike, computed in fp32, or fp64 for such parameters, and rounded once. Buffers are those of the newest. Needs memory of two
// more copies of the parameters. Returns the steps, the oldest first.
//
// InvalidArgument for a count below 1, for a folder with fewer checkpoints, and as load_weights; FileError as there. Nothing
// was changed then.
std::vector<int64_t> load_mean_weights(torch::nn::Module& model, const std::string& folder, int64_t count);

}  // namespace pacer
