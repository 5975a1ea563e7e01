// Copies of tensors in host memory, which is kept from one snapshot to the next: training goes on with the
// originals while the copies are written.
#pragma once

#include <map>
#include <string>

#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

class HostSnapshot {
 public:
  // The values as they are now, each dense in memory of its own, by the same names. Waits for the device
  // where there is one. The next call for the same group of tensors writes to that memory.
  const NamedTensors& take(const std::string& group, const NamedTensors& tensors);

 private:
  std::map<std::string, NamedTensors> groups_;
};

}  // namespace pacer::detail
