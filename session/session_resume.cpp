// How a Session continues from a checkpoint.
#include <algorithm>

#include <c10/util/Exception.h>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/session/session.h>

namespace pacer {

// What a schedule multiplies, or where there is none, the rates themselves.
std::vector<double> Session::base_rates() const {
  for (const auto& hook : parts_.hooks_) {
    if (std::vector<double> rates = hook->base_rates(); !rates.empty()) return rates;
  }
  return detail::learning_rates(parts_.optimizer());
}

void Session::set_base_rates(const std::vector<double>& rates) {
  for (const auto& hook : parts_.hooks_) {
    if (!hook->base_rates().empty()) return hook->set_base_rates(rates);
  }
  for (size_t g = 0; g < rates.size(); ++g) parts_.optimizer().param_groups()[g].options().set_lr(rates[g]);
}

std::optional<int64_t> Session::resume(const ResumeOptions& options) {
  require(parts_.load_newest != nullptr, "Session::resume needs a Checkpoints hook; add it with use() first");
  require(parts_.progress.step == 0 && parts_.progress.micro_step == 0 && !in_forward_ && !in_backward_,
          "Session::resume belongs before the first begin");
  start();
  const std::vector<double> of_program = base_rates();
  const std::optional<int64_t> step = parts_.load_newest();
  const std::vector<double> saved = base_rates();
  if (!step || saved == of_program) return step;
  require(saved.size() == of_program.size(), "the program has learning rates of ", of_program.size(),
          " parameter groups, but once the checkpoint was loaded there were ", saved.size());
  if (options.learning_rates() == ResumedRates::program) {
    set_base_rates(of_program);
  } else if (parts_.is_first_rank()) {
    const auto g = static_cast<size_t>(
        std::mismatch(saved.begin(), saved.end(), of_program.begin(), of_program.end()).first -
        saved.begin());
    TORCH_WARN(detail::concatenate(
        "parameter group ", g, " goes on with the learning rate ", saved[g],
        " of the checkpoint; the program "
        "says ",
        of_program[g], ", which resume(ResumeOptions().learning_rates(ResumedRates::program)) takes"));
  }
  return step;
}

}  // namespace pacer
