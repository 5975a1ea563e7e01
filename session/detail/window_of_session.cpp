#include <pacer/session/detail/window_of_session.h>

#include <algorithm>
#include <utility>

namespace pacer::detail {

bool WindowOfSession::has_hook(const Session& session, const Hook& hook) {
  const auto& hooks = session.hooks();
  return std::any_of(hooks.begin(), hooks.end(), [&](const auto& other) { return other.get() == &hook; });
}

WindowOfSession::WindowOfSession(Session& session) : session_(session) {
  session_.require_between_micro_steps();
}

Tensors WindowOfSession::begin(int64_t k, Tensors tensors) {
  parts().progress.micro_step = k;
  MicroBatch batch;
  try {
    batch = session_.prepare(std::move(tensors));
  } catch (...) {
    session_.drop_window();
    throw;
  }
  weights_.push_back(session_.weight_of(batch.tokens));
  examples_.push_back(batch.examples);
  parts().window.tokens += batch.tokens;
  parts().window.weight += weights_.back();
  return std::move(batch.tensors);
}

std::unique_ptr<ForwardScope> WindowOfSession::forward(int64_t k) {
  parts().progress.micro_step = k;
  return std::make_unique<HooksForwardScope>(parts());
}

at::Tensor WindowOfSession::scaled_loss(int64_t k, const at::Tensor& loss) {
  parts().micro_batch_examples = examples_[static_cast<size_t>(k)];
  return session_.scaled_loss(loss, weight(k));
}

void WindowOfSession::begin_backward() {
  session_.gradients_->begin_pass(parts(), /*is_first=*/true);
  Progress last = parts().progress;
  last.micro_step = last.micro_steps - 1;
  session_.begin_passes(last);
}

void WindowOfSession::end_backward() {
  Progress& progress = parts().progress;
  progress.micro_step = progress.micro_steps - 1;
  session_.end_passes();
}

}  // namespace pacer::detail
