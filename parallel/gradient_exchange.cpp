#include <pacer/parallel/gradient_exchange.h>

#include <pacer/hooks/session_parts.h>

namespace pacer {

void GradientExchange::backward_begin(const Progress& progress) {
  if (parts().world().world_size() == 1) return;
  const bool is_last = progress.micro_step + 1 == progress.micro_steps;
  follow_parameters(progress);
  if (is_last || sends_in_every_pass()) announce(progress, is_last ? Intent::step : Intent::micro_step);
  begin_pass(progress, is_last);
}

void GradientExchange::backward_end(const Progress& progress) {
  if (!is_joined()) return;
  const bool is_last = progress.micro_step + 1 == progress.micro_steps;
  end_pass(is_last);
  if (!is_last) await_peers();
}

void GradientExchange::backward_failed() {
  if (is_joined()) drop();
  ParallelTraining::backward_failed();
}

// A window that ends early did not begin to travel.
void GradientExchange::gradients_ready(const Progress& window) {
  if (!is_joined()) return;
  const bool ends_early = settle_totals(window);
  settle_missed(window);
  if (ends_early) reduce(window);
  Work loss = add_losses();
  wait();
  share_written_parameters();
  loss.wait();
}

}  // namespace pacer
