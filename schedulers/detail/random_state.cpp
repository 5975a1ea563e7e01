#include <pacer/schedulers/detail/random_state.h>

#include <mutex>

#include <ATen/Context.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

at::Tensor get(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set(at::Generator generator, const at::Tensor& state, const char* name) {
  require(state.defined() && state.scalar_type() == at::kByte && state.sizes() == get(generator).sizes(),
          "the random state of the ", name, " to load has another form than this LibTorch's");
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

RandomState get_random_state(at::Device device) {
  RandomState state;
  state.cpu = get(at::globalContext().defaultGenerator(at::kCPU));
  if (!device.is_cpu()) state.cuda = get(at::globalContext().defaultGenerator(device));
  return state;
}

void set_random_state(at::Device device, const RandomState& state) {
  if (!device.is_cpu()) set(at::globalContext().defaultGenerator(device), state.cuda, "GPU");
  set(at::globalContext().defaultGenerator(at::kCPU), state.cpu, "CPU");
}

}  // namespace pacer::detail
