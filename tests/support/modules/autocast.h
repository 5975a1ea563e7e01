// While one exists, operations on a kind of device run under autocast, to bf16 if not said otherwise.
#pragma once

#include <ATen/autocast_mode.h>

namespace pacer::testing {

class Autocast {
 public:
  explicit Autocast(at::DeviceType device, at::ScalarType dtype = at::kBFloat16)
      : device_(device), dtype_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_enabled(device_, true);
    at::autocast::set_autocast_dtype(device_, dtype);
    at::autocast::increment_nesting();
  }
  Autocast(const Autocast&) = delete;
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, false);
    at::autocast::set_autocast_dtype(device_, dtype_);
  }

 private:
  at::DeviceType device_;
  at::ScalarType dtype_;  // before
};

}  // namespace pacer::testing
