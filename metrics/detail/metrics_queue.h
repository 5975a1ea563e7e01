// Records of the Metrics hook between the step that made them and the arrival of their values from the GPU.
// First in, first out, whatever arrives first.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <pacer/device/detail/host_copy.h>
#include <pacer/metrics/detail/metrics_record.h>

namespace pacer {
class StepReport;
}

namespace pacer::detail {

class MetricsQueue {
 public:
  // More than these are not held back: the oldest is waited for.
  static constexpr size_t kLongest = 64;

  // How a tensor is brought to the host: start_host_copy, or what a test puts in its place.
  using Reader = std::function<std::unique_ptr<HostCopy>(const at::Tensor&)>;
  explicit MetricsQueue(Reader reader = start_host_copy);

  // Takes all that the report holds, without waiting. Throws InvalidArgument, taking nothing, where a name is
  // empty or there twice.
  // `speed`: nothing where the record has none.
  struct Speed {
    double seconds_per_step = 0, tokens_per_second = 0;
    std::optional<double> operations_per_second, utilization;
  };
  void push(const StepReport& report, std::optional<Speed> speed);

  // Throws InvalidArgument where no hook and no program may report a number of that name.
  static void require_free(const std::string& name);

  // The oldest record if its values are here, or if `wait`, or if too many are held back.
  std::optional<MetricsRecord> pop(bool wait);

  size_t size() const { return pending_.size(); }

 private:
  struct Pending {
    MetricsRecord record;                       // the numbers of the hooks alone
    std::unique_ptr<HostCopy> loss_sum, check;  // null where there is none
    std::unique_ptr<HostCopy> late_numbers;     // fp64, [n]; null where there is none
    std::vector<std::string> late_names;
    double loss_average = 1;
    std::optional<Speed> speed;

    bool arrived() const;
    void wait() const;
    MetricsRecord completed();
  };

  Reader reader_;
  std::deque<Pending> pending_;
};

}  // namespace pacer::detail
