// Pipeline parallelism: stages of a model lie on different ranks, and the micro-batches of a step are in
// flight between them, in the order of a schedule (pipeline_plan.h): GPipe, 1F1B, interleaved or zero bubble.
//
//   auto world = pacer::Communicator::from_environment();
//   pacer::Grid grid(world, /*stages=*/4);                     // 8 ranks: two pipelines of four stages
//   Gpt model(config);                                         // on the CPU, whole, on every rank
//   pacer::Pipeline pipeline(*model, model->blocks, &BlockImpl::forward, grid, pacer::one_f_one_b(8),
//                            pacer::PipelineOptions().first({"embedding"}).last({"norm", "head"}));
//   pacer::FusedAdamW optimizer(pipeline.named_parameters(), options);
//   pacer::Session session(*model, optimizer, world);
//   session.use(pipeline).use(pacer::GradientClipping(1.0));
//   for (auto& batch : *loader) {                              // the same batch on all ranks of a pipeline
//     auto loss = pipeline.step(session, batch.data, batch.target,
//                               [&](torch::Tensor tokens) { return model->embedding(tokens); },
//                               [&](torch::Tensor h, torch::Tensor y) { return model->loss(h, y); });
//     session.step();
//   }
//
// A rank moves its stage to its device and lets go of the rest of the model, which keeps its names and shapes
// and answers with a sentence where it is touched. pipeline.step takes the place of begin, forward and
// backward; micro-batches are the parts of the batch along its first dimension, and take the place of
// GradientAccumulation. Gradients are those of the whole model, accumulated over the micro-batches, to the
// bit; where several ranks use a parameter (tied weights), its gradients add up in another order, and where
// norms decide, they add up stage by stage. Random draws (dropout) are each rank's own.
//
// Hooks work as ever, with the exceptions that they name themselves. Layers of a LayerDrop that are dropped
// cost nothing, a stage may be empty. Checkpoints hold whole tensors by name: any number of stages resumes
// them, and a run without a Pipeline, too.
#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include <torch/nn/module.h>

#include <pacer/collectives/grid.h>
#include <pacer/core/error.h>
#include <pacer/modules/blocks.h>
#include <pacer/modules/tensor_call.h>
#include <pacer/optimizers/named_parameters.h>
#include <pacer/parallel/pipeline_options.h>
#include <pacer/parallel/pipeline_plan.h>

namespace pacer {

class Hook;
class Session;

namespace detail {
class PipelineHook;

// A member function of the blocks' class, whose arguments and results are tensors, as a function of block i.
template <class Result, class F, size_t... I>
auto block_function(const Blocks& blocks, F f, std::index_sequence<I...> arguments) {
  return [blocks = Blocks(blocks), f, arguments](size_t i, const Tensors& x) mutable {
    require(x.size() == arguments.size(), "block ", i, " of the Pipeline takes ", arguments.size(),
            " tensors, but what comes before it gives ", x.size());
    return ResultTensors<std::decay_t<Result>>::pack(blocks->run(i, f, x[I]...));
  };
}
template <class Result, class Block, class... Args>
auto block_function(const Blocks& blocks, Result (Block::*f)(Args...)) {
  return block_function<Result>(blocks, f, std::index_sequence_for<Args...>());
}
template <class Result, class Block, class... Args>
auto block_function(const Blocks& blocks, Result (Block::*f)(Args...) const) {
  return block_function<Result>(blocks, f, std::index_sequence_for<Args...>());
}
// Any function (size_t i, Tensor x), or (size_t i, const Tensors& x) as it is.
template <class F>
auto block_function(const Blocks& /*blocks*/, F f) {
  if constexpr (std::is_invocable_v<F&, size_t, at::Tensor>) {
    return [f = std::move(f)](size_t i, const Tensors& x) mutable {
      require(x.size() == 1, "block ", i, " of the Pipeline takes a tensor, but what comes before it gives ",
              x.size());
      using Packed = ResultTensors<std::decay_t<std::invoke_result_t<F&, size_t, at::Tensor>>>;
      return Packed::pack(f(i, x[0]));
    };
  } else {
    return f;
  }
}

}  // namespace detail

// A shared handle: the loop and the Session use the same one.
class Pipeline {
 public:
  using First = std::function<Tensors(const Tensors& batch)>;
  using Block = std::function<Tensors(size_t i, const Tensors& x)>;
  using Last = std::function<at::Tensor(const Tensors& x, const Tensors& batch)>;

  // All ranks of the grid together, with the same model, before it is moved to a device and before the
  // optimizer is made. `forward`: a member function of the blocks' class that takes tensors and returns as
  // many, or a function (size_t i, torch::Tensor x) that runs block i. `schedule`: its number of ranks is
  // that of the grid's stages. The model must outlive the Pipeline. Throws InvalidArgument for a schedule or
  // cut that does not fit, and for tensors of the model that no stage has, and CommunicationError where ranks
  // have different schedules; then nothing was changed.
  template <class F>
  Pipeline(torch::nn::Module& model, const Blocks& blocks, F forward, Grid grid, PipelineSchedule schedule,
           PipelineOptions options = {})
      : Pipeline(model, blocks, Block(detail::block_function(blocks, std::move(forward))), std::move(grid),
                 schedule, std::move(options)) {}
  Pipeline(torch::nn::Module& model, const Blocks& blocks, Block forward, Grid grid,
           PipelineSchedule schedule, PipelineOptions options = {});

  // The parameters that this rank trains, with their names in the model: what its optimizer is made from.
  const NamedParameters& named_parameters() const;
  const Grid& grid() const;
  const PipelineSchedule& schedule() const;
  // Blocks first ... last - 1 of this rank's stage number `chunk`.
  std::pair<int64_t, int64_t> blocks_of(int64_t chunk = 0) const;

  // Forward and backward of a step; session.step() follows. The batch is the same on all ranks of a pipeline;
  // it is cut along its first dimension, a multiple of the number of micro-batches, or with
  // PipelineOptions::weight_by_tokens any number from that on, the same in all tensors. `first(data)` returns
  // what the first block takes: a tensor, or a tuple or vector of tensors. `last(h, target)`, with what the
  // last block returned, returns the mean loss of the micro-batch. Returns the mean loss of the batch, fp32,
  // on every rank of this pipeline. Throws as Session::begin and backward do.
  template <class F, class L>
  at::Tensor step(Session& session, const at::Tensor& data, const at::Tensor& target, F first, L last) const {
    return step(session, Tensors{data, target}, first_of(std::move(first)), last_of(std::move(last)));
  }
  // The same for batches of any number of tensors.
  at::Tensor step(Session& session, const Tensors& batch, const First& first, const Last& last) const;

  // The mean loss of a batch, in eval() and without gradients, on every rank of this pipeline. Between steps;
  // the batch is cut as in step(). Also inside Session::evaluate and Validation.
  template <class F, class L>
  at::Tensor evaluate(const at::Tensor& data, const at::Tensor& target, F first, L last) const {
    return evaluate(Tensors{data, target}, first_of(std::move(first)), last_of(std::move(last)));
  }
  at::Tensor evaluate(const Tensors& batch, const First& first, const Last& last) const;

  // Returns the hook that a Session uses for it.
  std::shared_ptr<Hook> hook() const;

 private:
  template <class F>
  static First first_of(F first) {
    return [first = std::move(first)](const Tensors& batch) mutable {
      using Packed = detail::ResultTensors<std::decay_t<std::invoke_result_t<F&, at::Tensor>>>;
      return Packed::pack(first(batch[0]));
    };
  }
  template <class L>
  static Last last_of(L last) {
    return [last = std::move(last)](const Tensors& x, const Tensors& batch) mutable {
      if constexpr (std::is_invocable_v<L&, at::Tensor, at::Tensor>) {
        require(x.size() == 1,
                "the last function given to the Pipeline takes one tensor of the last block, which "
                "gives ",
                x.size(), "; let it take a const std::vector<torch::Tensor>&");
        return at::Tensor(last(x[0], batch[1]));
      } else {
        return at::Tensor(last(x, batch[1]));
      }
    };
  }

  std::shared_ptr<detail::PipelineHook> hook_;
  Block block_;
};

}  // namespace pacer
