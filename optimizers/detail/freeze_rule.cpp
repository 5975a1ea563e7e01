#include <pacer/optimizers/detail/freeze_rule.h>

#include <cmath>
#include <utility>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

constexpr double kStandsStill = 0.96;

// ceil(0.15 P) and floor(0.30 P) without a rounding error.
int64_t first_step(int64_t planned) { return planned / 20 * 3 + (planned % 20 * 3 + 19) / 20; }
int64_t last_step(int64_t planned) { return planned / 10 * 3 + planned % 10 * 3 / 10; }

int64_t checked_distance(int64_t planned_steps, double beta2) {
  require(planned_steps >= 4, "freeze_automatically needs a run of at least 4 planned steps, not ",
          planned_steps);
  return std::llround(1.0 / (1.0 - beta2));
}

}  // namespace

FreezeRule::FreezeRule(int64_t planned_steps, double beta2)
    : begin_(first_step(planned_steps)),
      end_(last_step(planned_steps)),
      distance_(checked_distance(planned_steps, beta2)),
      // Where the window ends before a first comparison, nothing is remembered.
      norms_(distance_ < end_ ? static_cast<size_t>(distance_) + 1 : 1, 0.0) {}

bool FreezeRule::is_due(int64_t step, double norm) {
  const auto places = static_cast<int64_t>(norms_.size());
  norms_[static_cast<size_t>(step % places)] = norm;
  if (step >= end_) return true;
  if (step < begin_ || step <= distance_) return false;
  const double before = norms_[static_cast<size_t>((step - distance_) % places)];
  return norm >= kStandsStill * before && kStandsStill * norm <= before && before > 0;
}

void FreezeRule::set_norms(std::vector<double> norms) {
  require(norms.size() == norms_.size(), "the freeze rule remembers ", norms_.size(),
          " norms of the variance, not ", norms.size(),
          "; resume with the options of the run that was saved");
  norms_ = std::move(norms);
}

}  // namespace pacer::detail
