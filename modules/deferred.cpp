#include <pacer/modules/deferred.h>

#include <mutex>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include <pacer/device/detail/deferred_storage.h>
#include <pacer/device/detail/random_state.h>

namespace pacer {
namespace {

// A golden section of 2^64, by which the seeds of neighbours are far apart.
constexpr uint64_t kGoldenRatio = 0x9E37'79B9'7F4A'7C15;

void check_deferrable(const torch::nn::Module& module, const c10::TensorOptions& options) {
  require(!options.has_device() || !options.device().is_meta(),
          "defer_initialization was given the meta device, from which a tensor cannot come back; give it the "
          "device on which the model shall train");
  for (const auto& item : module.named_parameters()) {
    require(!item.value().is_meta(), "defer_initialization takes the memory of parameters, but ", item.key(),
            " is on the meta device, from which a tensor cannot come back; make the module on the CPU");
    require(item.value().layout() == at::kStrided && item.value().is_contiguous(), "parameter ", item.key(),
            " of shape ", item.value().sizes(),
            " is not contiguous, so ranks cannot share it out; give it contiguous memory before "
            "defer_initialization");
  }
}

// Ranks may be threads of one process, whose generator is one.
std::mutex& seeding() {
  static std::mutex mutex;
  return mutex;
}

c10::Device device_of(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  return parameters.empty() ? c10::Device(at::kCPU) : parameters.front().device();
}

void seed_generator(c10::Device device, uint64_t seed) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

}  // namespace

void defer_initialization(torch::nn::Module& module, const c10::TensorOptions& options) {
  check_deferrable(module, options);
  const at::NoGradGuard no_grad;
  for (const auto& item : module.named_parameters()) {
    at::Tensor parameter = item.value();
    c10::TensorOptions kind = parameter.options();
    if (options.has_device()) kind = kind.device(options.device());
    if (options.has_dtype() && parameter.is_floating_point()) kind = kind.dtype(options.dtype());
    const bool is_as_wanted = kind.device() == parameter.device() && kind.dtype() == parameter.dtype();
    if (is_deferred(parameter) && is_as_wanted) continue;  // another block's, too
    detail::defer(parameter, kind,
                  "parameter " + item.key() +
                      " has no values yet, because defer_initialization took its memory; Shards with "
                      "ShardsOptions::materialize gives it values at the first begin");
  }
  detail::return_freed_memory();
  if (!options.has_device()) return;
  for (at::Tensor& buffer : module.buffers()) {
    if (buffer.defined()) buffer.set_data(buffer.to(options.device()));
  }
}

bool is_deferred(const at::Tensor& tensor) { return detail::is_deferred(tensor); }

MaterializeBlock seeded_blocks(uint64_t seed, std::function<void(torch::nn::Module& block)> initialize) {
  require(initialize != nullptr, "seeded_blocks was given no function; give it one that initializes a block");
  return [seed, initialize = std::move(initialize)](const DeferredBlock& block) {
    const std::lock_guard<std::mutex> lock(seeding());
    const c10::Device device = device_of(block.module);
    const detail::RandomState before = detail::get_random_state(device);
    const uint64_t of_block = seed + kGoldenRatio * (block.index + 1);
    seed_generator(at::kCPU, of_block);
    if (!device.is_cpu()) seed_generator(device, of_block);
    try {
      initialize(block.module);
    } catch (...) {
      detail::set_random_state(device, before);
      throw;
    }
    detail::set_random_state(device, before);
  };
}

}  // namespace pacer
