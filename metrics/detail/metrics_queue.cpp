#include <pacer/metrics/detail/metrics_queue.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include <ATen/ops/stack.h>

#include <pacer/core/error.h>
#include <pacer/files/json_writer.h>
#include <pacer/hooks/step_report.h>
#include <pacer/kernels/math/gradient_guard.h>

namespace pacer::detail {
namespace {

constexpr const char* kMetricsOwnNames[] = {"step",
                                            "tokens",
                                            "loss",
                                            "gradient_norm",
                                            "loss_scale",
                                            "skipped_steps",
                                            "seconds_per_step",
                                            "tokens_per_second",
                                            "operations_per_second",
                                            "utilization"};

void require_not_taken(const std::string& name, bool is_taken) {
  require(!is_taken, "a hook or Session::record reports the number ", json_quote(name),
          ", but metrics have one of that name already; give it another name");
}

void require_unique_names(const StepReport& report) {
  std::set<std::string> names;
  const auto take = [&](const std::string& name) {
    MetricsQueue::require_free(name);
    require_not_taken(name, !names.insert(name).second);
  };
  for (const auto& [name, number] : report.numbers()) take(name);
  for (const auto& [name, number] : report.late_numbers()) take(name);
}

}  // namespace

MetricsQueue::MetricsQueue(Reader reader) : reader_(std::move(reader)) {}

void MetricsQueue::require_free(const std::string& name) {
  require(!name.empty(), "a hook or Session::record reports a number without a name; give it one");
  require_not_taken(name, std::any_of(std::begin(kMetricsOwnNames), std::end(kMetricsOwnNames),
                                      [&](const char* own) { return name == own; }));
}

void MetricsQueue::push(const StepReport& report, std::optional<Speed> speed) {
  require_unique_names(report);
  Pending pending;
  pending.record.step = report.progress().step;
  pending.record.tokens = report.progress().tokens;
  pending.record.values = report.numbers();
  if (report.loss_sum().defined()) pending.loss_sum = reader_(report.loss_sum());
  if (report.check().defined()) pending.check = reader_(report.check());
  std::vector<at::Tensor> late;
  for (const auto& [name, number] : report.late_numbers()) {
    pending.late_names.push_back(name);
    late.push_back(number.to(report.late_numbers().front().second.device(), /*non_blocking=*/true));
  }
  if (!late.empty()) pending.late_numbers = reader_(at::stack(late));
  pending.loss_average = report.loss_average();
  pending.speed = speed;
  pending_.push_back(std::move(pending));
}

std::optional<MetricsRecord> MetricsQueue::pop(bool wait) {
  if (pending_.empty()) return std::nullopt;
  Pending& oldest = pending_.front();
  if (wait || pending_.size() > kLongest) {
    oldest.wait();
  } else if (!oldest.arrived()) {
    return std::nullopt;
  }
  MetricsRecord record = oldest.completed();
  pending_.pop_front();
  return record;
}

bool MetricsQueue::Pending::arrived() const {
  return (!loss_sum || loss_sum->arrived()) && (!check || check->arrived()) &&
         (!late_numbers || late_numbers->arrived());
}

void MetricsQueue::Pending::wait() const {
  if (loss_sum) loss_sum->wait();
  if (check) check->wait();
  if (late_numbers) late_numbers->wait();
}

MetricsRecord MetricsQueue::Pending::completed() {
  auto& values = record.values;
  if (loss_sum) {
    const at::Tensor& value = loss_sum->value();
    const double sum =
        value.scalar_type() == at::kDouble ? *value.const_data_ptr<double>() : *value.const_data_ptr<float>();
    values.emplace(values.begin(), "loss", sum * loss_average);
  }
  for (size_t i = 0; i < late_names.size(); ++i) {
    values.emplace_back(std::move(late_names[i]), late_numbers->value().const_data_ptr<double>()[i]);
  }
  if (check) {
    kernels::GradientCheck read;
    std::memcpy(&read, check->value().const_data_ptr(), sizeof read);
    values.emplace_back("gradient_norm", read.norm);
    if (read.loss_scale != 1) values.emplace_back("loss_scale", static_cast<double>(read.loss_scale));
    values.emplace_back("skipped_steps", static_cast<double>(read.skipped_steps));
  }
  if (speed) {
    values.emplace_back("seconds_per_step", speed->seconds_per_step);
    values.emplace_back("tokens_per_second", speed->tokens_per_second);
    if (speed->operations_per_second) {
      values.emplace_back("operations_per_second", *speed->operations_per_second);
    }
    if (speed->utilization) values.emplace_back("utilization", *speed->utilization);
  }
  return std::move(record);
}

}  // namespace pacer::detail
