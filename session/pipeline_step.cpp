// The step of a Pipeline, which needs a whole Session. What runs in the Session's window is in
// parallel/detail/pipeline_run.h.
#include <ATen/core/grad_mode.h>

#include <pacer/core/error.h>
#include <pacer/parallel/detail/pipeline_hook.h>
#include <pacer/parallel/detail/pipeline_run.h>
#include <pacer/parallel/pipeline.h>
#include <pacer/session/detail/window_of_session.h>
#include <pacer/session/session.h>

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
