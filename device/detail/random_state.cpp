#include <pacer/device/detail/random_state.h>

#include <mutex>

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

at::Tensor get(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void check(at::Generator generator, const at::Tensor& state, const char* name) {
  require(state.defined() && state.scalar_type() == at::kByte && state.sizes() == get(generator).sizes(),
          "the random state of the ", name, " to load has another form than this LibTorch's");
  try {
    generator.clone().set_state(state);
  } catch (const c10::Error& error) {
    throw InvalidArgument(concatenate("the random state of the ", name, " to load is none of LibTorch's (",
                                      error.what_without_backtrace(), ")"));
  }
}

void set(at::Generator generator, const at::Tensor& state) {
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
  const at::Generator cpu = at::globalContext().defaultGenerator(at::kCPU);
  check(cpu, state.cpu, "CPU");
  if (!device.is_cpu() && state.cuda.defined()) {
    const at::Generator cuda = at::globalContext().defaultGenerator(device);
    check(cuda, state.cuda, "GPU");
    set(cuda, state.cuda);
  }
  set(cpu, state.cpu);
}

std::string note_on_random_state(bool run_has_gpu, bool saved_has_gpu) {
  if (run_has_gpu == saved_has_gpu) return "";
  return run_has_gpu
             ? "the checkpoint was saved on a CPU; the GPU's random generator keeps the state it has, "
               "so random draws on the GPU are not those of the saved run"
             : "the checkpoint was saved on a GPU; this run is on a CPU and takes the state of the "
               "CPU's random generator alone, so random draws are not those of the saved run";
}

}  // namespace pacer::detail
