#include <pacer/metrics/detail/named_means.h>

#include <algorithm>

#include <pacer/hooks/step_report.h>

namespace pacer::detail {

void NamedMeans::add(const std::string& name, const at::Tensor& value) {
  auto sum = std::find_if(sums_.begin(), sums_.end(), [&](const Sum& other) { return other.name == name; });
  if (sum == sums_.end()) {
    sum = sums_.emplace(sum);
    sum->name = name;
  }
  if (value.is_cpu()) {
    sum->on_host += value.detach().item<double>();
  } else {
    const at::Tensor number = value.detach().reshape({});
    if (sum->on_device.defined()) {
      sum->on_device.add_(number.to(sum->on_device.options(), /*non_blocking=*/true));
    } else {
      sum->on_device = number.to(number.options().dtype(at::kDouble), /*non_blocking=*/true, /*copy=*/true);
    }
  }
  ++sum->count;
}

void NamedMeans::move_to(StepReport& report) {
  for (Sum& sum : sums_) {
    const auto count = static_cast<double>(sum.count);
    if (sum.on_device.defined()) {
      report.add(std::move(sum.name), sum.on_device.add_(sum.on_host).div_(count));
    } else {
      report.add(std::move(sum.name), sum.on_host / count);
    }
  }
  sums_.clear();
}

}  // namespace pacer::detail
