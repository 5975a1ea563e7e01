#include <pacer/session/validation.h>

#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/evaluation_scope.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/sharded_state.h>
#include <pacer/hooks/step_report.h>

namespace pacer {

Validation::Validation(ValidationOptions options, std::function<double()> measure)
    : options_(std::move(options)), measure_(std::move(measure)) {
  require(options_.every() >= 1, "Validation needs a number of steps >= 1 between measurements, not ",
          options_.every());
  require(!options_.name().empty(), "Validation needs a name for its value; it is empty");
  require(measure_ != nullptr, "Validation needs a function that returns the value; it is empty");
}

void Validation::attach(SessionParts& parts) {
  parts.validation = {options_.name(), 0, -1, options_.larger_is_better()};
  parts_ = &parts;
}

std::string Validation::agreement() const {
  return detail::concatenate(options_.name(), " every ", options_.every(), " steps, ",
                             options_.larger_is_better() ? "larger" : "smaller", " is better");
}

// The numbers travel as their bytes, so that every rank adds up the same ones.
double Validation::mean_over_ranks(const std::function<double()>& own) const {
  Communicator& world = parts_->world();
  if (world.world_size() == 1) return own();
  const ShardedState* sharded = parts_->sharded_state;
  const bool gathers = sharded != nullptr && sharded->keeps_parts();
  std::string message;
  try {
    const double value = own();
    message.assign(1 + sizeof value, '+');
    std::memcpy(message.data() + 1, &value, sizeof value);
  } catch (const std::exception& error) {
    message = detail::concatenate("-", error.what());
    if (gathers ||
        parts_->replicas) {  // the others may wait for a block or a stage, and not for this message
      world.leave(detail::concatenate("the function given to Validation failed: ", error.what()));
      throw;
    }
  }
  if (gathers) sharded->require_same_history();
  const std::vector<std::string> all =
      world.exchange(message, CollectiveOptions().timeout(options_.timeout()));
  double sum = 0;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    require<Error>(all[rank].front() == '+', "the function given to Validation failed on rank ", rank, ": ",
                   all[rank].substr(1));
    double value = 0;
    std::memcpy(&value, all[rank].data() + 1, sizeof value);
    sum += value;
  }
  return sum / static_cast<double>(all.size());
}

void Validation::measure_at(int64_t step) {
  const double value = mean_over_ranks([this] {
    detail::EvaluationScope scope(*parts_);
    const double measured = measure_();
    scope.end_pass();
    return measured;
  });
  parts_->validation.value = value;
  parts_->validation.step = step;
}

void Validation::after_step(StepReport& report) {
  const int64_t step = report.progress().step;
  if (step % options_.every() != 0) return;
  measure_at(step);
  report.add(options_.name(), parts_->validation.value);
  report.request_record();
}

void Validation::finish(const Progress& progress) {
  if (progress.step > 0 && parts_->validation.step != progress.step) measure_at(progress.step);
}

}  // namespace pacer
