// Means of values by their names, added up where the values are, without waiting for a GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace pacer {
class StepReport;
}

namespace pacer::detail {

class NamedMeans {
 public:
  // Takes what `value`, one real number, holds now.
  void add(const std::string& name, const at::Tensor& value);

  // Gives the report the mean of each name's values, in the order in which the names came, and begins anew.
  void move_to(StepReport& report);

 private:
  struct Sum {
    std::string name;
    double on_host = 0;
    at::Tensor on_device;  // fp64, no dimensions; undefined: nothing came from a device
    int64_t count = 0;
  };
  std::vector<Sum> sums_;
};

}  // namespace pacer::detail
