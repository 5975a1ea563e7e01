// What the blocks of a model cost, measured, for a cut whose stages take the same time.
//
//   const auto seconds = pacer::time_blocks(model->blocks, &BlockImpl::forward, {sample}, *world);
//   options.cut(pacer::balanced_cut(seconds, /*parts=*/4));
//   const auto schedule = pacer::one_f_one_b(8);
//   pacer::Pipeline pipeline(*model, model->blocks, &BlockImpl::forward, grid, schedule, options);
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include <pacer/collectives/communicator.h>
#include <pacer/modules/blocks.h>
#include <pacer/modules/tensor_call.h>
#include <pacer/parallel/pipeline.h>

namespace pacer {

// Returns the seconds that forward and backward of each block take, the least of three passes after one that
// does not count: those of rank 0, on every rank, so that all cut alike. All ranks of `world` call it, before
// the Pipeline is made. Each block is moved to the world's device and back to where it was. `sample`: what
// the first block takes, of a micro-batch; each further block is given what the one before it returned.
// Gradients of the blocks are cleared. What the first and the last stage do beside their blocks is not
// measured: add it to the first and the last number. Throws InvalidArgument for a stack without blocks and a
// sample without a tensor.
std::vector<double> time_blocks(const Blocks& blocks,
                                const std::function<Tensors(size_t i, const Tensors& x)>& forward,
                                Tensors sample, Communicator& world);
template <class F>
std::vector<double> time_blocks(const Blocks& blocks, F forward, Tensors sample, Communicator& world) {
  const std::function<Tensors(size_t, const Tensors&)> f = detail::block_function(blocks, std::move(forward));
  return time_blocks(blocks, f, std::move(sample), world);
}

}  // namespace pacer
