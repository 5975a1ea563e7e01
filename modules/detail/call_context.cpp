#include <pacer/modules/detail/call_context.h>

#include <ATen/autocast_mode.h>

namespace pacer::detail {

CallContext CallContext::now(std::vector<at::Device> gpus) {
  CallContext context;
  context.fp8_ = Fp8Scope::current();
  context.remember_autocast(at::kCPU);
  if (gpus.empty()) context.random_.push_back(get_random_state(at::kCPU));
  for (const at::Device gpu : gpus) context.random_.push_back(get_random_state(gpu));
  if (!gpus.empty()) context.remember_autocast(gpus[0].type());
  context.gpus_ = std::move(gpus);
  return context;
}

void CallContext::remember_autocast(at::DeviceType device) {
  autocast_.push_back(
      {device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
}

void CallContext::enter() const {
  Fp8Scope::set_current(fp8_);
  for (const Autocast& autocast : autocast_) {
    at::autocast::set_autocast_enabled(autocast.device, autocast.enabled);
    at::autocast::set_autocast_dtype(autocast.device, autocast.dtype);
  }
  for (size_t i = 0; i < random_.size(); ++i) {
    set_random_state(gpus_.empty() ? at::Device(at::kCPU) : gpus_[i], random_[i]);
  }
}

NoAutocastCache::NoAutocastCache() : was_enabled_(at::autocast::is_autocast_cache_enabled()) {
  at::autocast::set_autocast_cache_enabled(false);
}
NoAutocastCache::~NoAutocastCache() { at::autocast::set_autocast_cache_enabled(was_enabled_); }

}  // namespace pacer::detail
