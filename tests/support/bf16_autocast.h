// While one exists, operations on a kind of device run under autocast to bf16.
#pragma once

#include <ATen/autocast_mode.h>

namespace pacer::testing {

class Bf16Autocast {
 public:
  explicit Bf16Autocast(at::DeviceType device) : device_(device) {
    at::autocast::set_autocast_enabled(device_, true);
    at::autocast::set_autocast_dtype(device_, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  Bf16Autocast(const Bf16Autocast&) = delete;
  ~Bf16Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, false);
  }

 private:
  at::DeviceType device_;
};

}  // namespace pacer::testing
