// The step of a Pipeline, which needs a whole Session. What runs in the Session's window is in
// schedulers/detail/pipeline_run.h.
#include <ATen/core/grad_mode.h>

#include <pacer/core/error.h>
#include <pacer/schedulers/detail/pipeline_hook.h>
#include <pacer/schedulers/detail/pipeline_run.h>
#include <pacer/schedulers/detail/window_of_session.h>
#include <pacer/schedulers/pipeline.h>
#include <pacer/schedulers/session.h>

namespace pacer {

at::Tensor Pipeline::step(Session& session, const Tensors& batch, const First& first,
                          const Last& last) const {
  require(detail::WindowOfSession::has_hook(session, *hook_),
          "this Pipeline is not in use by the Session given to step(); call "
          "session.use(pipeline) before the first step");
  require(
      at::GradMode::is_enabled(),
      "Pipeline::step with gradients switched off (NoGradGuard); use Pipeline::evaluate for a loss alone");
  detail::WindowOfSession window(session);
  const detail::PipelineFunctions functions{first, block_, last};
  return detail::PipelineRun(*hook_, functions).train(window, batch);
}

}  // namespace pacer
