#include <pacer/parallel/pipeline.h>

#include <pacer/collectives/detail/all_ranks_or_none.h>
#include <pacer/parallel/detail/pipeline_hook.h>
#include <pacer/parallel/detail/pipeline_run.h>

namespace pacer {

Pipeline::Pipeline(torch::nn::Module& model, const Blocks& blocks, Block forward, Grid grid,
                   PipelineSchedule schedule, PipelineOptions options)
    : block_(std::move(forward)) {
  detail::set_up(*grid.world(), [&] {
    hook_ = std::make_shared<detail::PipelineHook>(model, blocks, grid, schedule, std::move(options));
  });
}

std::shared_ptr<Hook> Pipeline::hook() const { return hook_; }

const NamedParameters& Pipeline::named_parameters() const { return hook_->stage_model().parameters(); }

const Grid& Pipeline::grid() const { return hook_->grid(); }

const PipelineSchedule& Pipeline::schedule() const { return hook_->schedule(); }

std::pair<int64_t, int64_t> Pipeline::blocks_of(int64_t chunk) const {
  require(chunk >= 0 && chunk < schedule().chunks, "this rank has ", schedule().chunks,
          " stages of the Pipeline, and no stage ", chunk);
  const int64_t stage = schedule().stage(grid().stage(), chunk);
  return {hook_->stage_model().first_block(stage), hook_->stage_model().end_block(stage)};
}

at::Tensor Pipeline::evaluate(const Tensors& batch, const First& first, const Last& last) const {
  require(hook_->session_parts() != nullptr,
          "Pipeline::evaluate needs the Pipeline in a Session; call "
          "session.use(pipeline) first");
  const detail::PipelineFunctions functions{first, block_, last};
  return detail::PipelineRun(*hook_, functions).evaluate(batch);
}

}  // namespace pacer
