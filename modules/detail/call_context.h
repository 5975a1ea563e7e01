// What a function of a model depends on beside its arguments, its parameters and its buffers: random state,
// autocast and 8-bit scaling.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <pacer/device/detail/random_state.h>
#include <pacer/modules/fp8_scaling.h>

namespace pacer::detail {

class CallContext {
 public:
  // Returns what holds now in this thread, for the CPU and these GPUs.
  static CallContext now(std::vector<at::Device> gpus);
  void enter() const;

  const std::vector<at::Device>& gpus() const { return gpus_; }

 private:
  struct Autocast {
    at::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };
  void remember_autocast(at::DeviceType device);

  std::vector<at::Device> gpus_;
  std::vector<RandomState> random_;  // of each GPU with the CPU; of the CPU alone where there is none
  std::vector<Autocast> autocast_;
  std::shared_ptr<Fp8Scaling> fp8_;
};

// Autocast remembers casts of leaves. One made without a graph must not serve a pass that needs its gradient,
// and one made in a second run would be kept by nobody's scope.
class NoAutocastCache {
 public:
  NoAutocastCache();
  NoAutocastCache(const NoAutocastCache&) = delete;
  ~NoAutocastCache();

 private:
  bool was_enabled_;
};

}  // namespace pacer::detail
