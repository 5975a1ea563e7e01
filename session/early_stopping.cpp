#include <pacer/session/early_stopping.h>

#include <cmath>

#include <pacer/core/error.h>
#include <pacer/files/number_text.h>
#include <pacer/hooks/detail/best_value_state.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/step_report.h>

namespace pacer {

EarlyStopping::EarlyStopping(EarlyStoppingOptions options) : options_(options) {
  require(options_.patience() >= 1, "EarlyStopping needs a patience of at least 1 measurement, not ",
          options_.patience());
  require(std::isfinite(options_.min_delta()) && options_.min_delta() >= 0,
          "EarlyStopping needs a finite min_delta >= 0 in the unit of the value, not ", options_.min_delta());
}

void EarlyStopping::attach(SessionParts& parts) { parts_ = &parts; }

std::string EarlyStopping::agreement() const {
  return detail::concatenate("patience ", options_.patience(), ", min_delta ",
                             exact_text(options_.min_delta()));
}

void EarlyStopping::start(const Progress& /*progress*/) {
  require(!parts_->validation.name.empty(),
          "EarlyStopping has nothing to look at; add session.use(pacer::Validation(every, function))");
}

void EarlyStopping::after_step(StepReport& report) {
  const ValidationResult& validation = parts_->validation;
  if (validation.step != report.progress().step) return;
  best_.take(validation.value, validation.step, options_.min_delta(), validation.larger_is_better);
  decide();
}

void EarlyStopping::decide() {
  if (best_.since < options_.patience() || parts_->should_stop) return;
  parts_->should_stop = true;
  parts_->stop_reason =
      detail::concatenate(parts_->validation.name, " has not improved in ", best_.since, " measurements");
  if (best_.step >= 0) {
    parts_->stop_reason += detail::concatenate(" since step ", best_.step, ", where it was ", best_.value);
  }
}

void EarlyStopping::save(NamedTensors& state) const { detail::save_best_value(best_, state); }

void EarlyStopping::load(const NamedTensors& state) {
  best_ = detail::load_best_value(state);
  decide();
}

}  // namespace pacer
