#include <pacer/hooks/batch_schedule.h>

#include <algorithm>

#include <pacer/core/error.h>

namespace pacer {
namespace {

void require_micro_steps(int64_t micro_steps) {
  // Draws of layer gates number micro-steps with 24 bits.
  require(micro_steps >= 1 && micro_steps < (int64_t{1} << 24),
          "BatchSchedule needs between 1 and 2^24 - 1 micro-steps, not ", micro_steps);
}

}  // namespace

BatchSchedule::BatchSchedule(int64_t first) : first_(first) { require_micro_steps(first); }

BatchSchedule& BatchSchedule::table(Table table) {
  require(!table.empty(), "BatchSchedule::table needs at least one boundary; it is empty");
  int64_t before = 0;
  for (const auto& [boundary, micro_steps] : table) {
    require(boundary > before, "BatchSchedule::table: boundaries begin at 1 or later and increase, but ",
            boundary, " follows ", before);
    require_micro_steps(micro_steps);
    before = boundary;
  }
  return become(std::move(table));
}

BatchSchedule& BatchSchedule::doubling(int64_t every, int64_t last) {
  require(every >= 1 && every <= (int64_t{1} << 56),
          "BatchSchedule::doubling needs progress between two changes of 1 ... 2^56, not ", every);
  require_micro_steps(last);
  Table table;
  for (int64_t micro_steps = first_; micro_steps < last;) {
    micro_steps *= 2;
    table.emplace_back(every * static_cast<int64_t>(table.size() + 1), micro_steps);
  }
  require(!table.empty() && table.back().second == last, "BatchSchedule::doubling: ", last,
          " micro-steps are not 2, 4, 8 ... times the first ", first_);
  return become(std::move(table));
}

BatchSchedule& BatchSchedule::become(Table table) {
  require(table_.empty(), "BatchSchedule was given a table, or doubling, twice; leave one out");
  table_ = std::move(table);
  return *this;
}

BatchSchedule& BatchSchedule::by_tokens() {
  by_tokens_ = true;
  return *this;
}

void BatchSchedule::validate() const {
  require(!table_.empty(), "BatchSchedule does not say when the batch changes; call table or doubling");
}

int64_t BatchSchedule::micro_steps(const Progress& progress) const {
  validate();
  const int64_t now = position(progress);
  const auto next =
      std::find_if(table_.begin(), table_.end(), [&](const auto& row) { return row.first > now; });
  return next == table_.begin() ? first_ : std::prev(next)->second;
}

int64_t BatchSchedule::most() const {
  int64_t most = first_;
  for (const auto& row : table_) most = std::max(most, row.second);
  return most;
}

bool BatchSchedule::settled(const Progress& progress) const {
  return table_.empty() || position(progress) >= table_.back().first;
}

std::string BatchSchedule::describe() const {
  std::string text = detail::concatenate(first_, " micro-steps");
  for (const auto& [boundary, micro_steps] : table_) {
    text += detail::concatenate(", ", micro_steps, " from ", by_tokens_ ? "token " : "step ", boundary);
  }
  return text;
}

}  // namespace pacer
