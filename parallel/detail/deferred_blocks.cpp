#include <pacer/parallel/detail/deferred_blocks.h>

#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/deferred_storage.h>

namespace pacer::detail {
namespace {

std::unordered_map<const torch::nn::Module*, std::string> names_of_modules(const torch::nn::Module& model) {
  std::unordered_map<const torch::nn::Module*, std::string> names;
  for (const auto& item : model.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    names.emplace(item.value().get(), item.key());
  }
  return names;
}

}  // namespace

DeferredBlocks::DeferredBlocks(const torch::nn::Module& model, const std::vector<Blocks>& stacks) {
  const auto names = names_of_modules(model);
  std::unordered_map<const void*, size_t> numbers;
  size_t index = 0;
  for (const Blocks& blocks : stacks) {
    for (const auto& module : *blocks) {
      const auto found = names.find(module.get());
      Block block{{*module, index++, found == names.end() ? "" : found->second}, {}};
      for (const auto& item : module->named_parameters()) {
        if (!is_deferred(item.value())) continue;
        const auto [place, is_new] = numbers.emplace(item.value().unsafeGetTensorImpl(), parameters_.size());
        if (is_new) {
          Awaited& awaited = parameters_.emplace_back();
          awaited.name = block.block.name + "." + item.key();
          awaited.parameter = item.value();
          awaited.value = deferred_value(item.value());
          awaited.has_value = awaited.value.defined();
          awaited.kind = item.value().options();
          awaited.sizes = item.value().sizes().vec();
        }
        block.parameters.push_back(place->second);
      }
      if (!block.parameters.empty()) blocks_.push_back(std::move(block));
    }
  }
  for (const auto& item : model.named_parameters()) {
    require(
        !is_deferred(item.value()) || numbers.count(item.value().unsafeGetTensorImpl()) > 0, "parameter ",
        item.key(),
        " has no values, because defer_initialization took its memory, and it is in none of the blocks that "
        "Shards was given, to which alone it gives values; defer blocks only");
  }
}

std::vector<size_t> DeferredBlocks::without_values(const Block& block) const {
  std::vector<size_t> numbers;
  for (const size_t number : block.parameters) {
    if (!parameters_[number].has_value) numbers.push_back(number);
  }
  return numbers;
}

void DeferredBlocks::require_values(bool has_function) const {
  for (const Awaited& awaited : parameters_) {
    require(
        has_function || awaited.has_value, "parameter ", awaited.name,
        " has no values, because defer_initialization took its memory; give Shards a function that writes "
        "them, ShardsOptions::materialize, or resume from a checkpoint");
  }
}

void DeferredBlocks::give_memory(const Block& block) {
  const at::NoGradGuard no_grad;
  for (const size_t number : block.parameters) {
    at::Tensor& parameter = parameters_[number].parameter;
    if (is_deferred(parameter))
      parameter.set_data(at::empty_like(parameter, at::TensorOptions().requires_grad(false)));
  }
}

// One that several blocks have keeps what the first of them remembered.
void DeferredBlocks::remember_memory(Awaited& awaited) const {
  if (std::exchange(awaited.has_memory, true)) return;
  awaited.version = awaited.parameter._version();
  awaited.storage = awaited.parameter.storage().unsafeGetStorageImpl();
}

void DeferredBlocks::fill(const Block& block, const MaterializeBlock& f) {
  const at::NoGradGuard no_grad;
  for (const size_t number : block.parameters) remember_memory(parameters_[number]);
  if (!without_values(block).empty()) f(block.block);
  for (const size_t number : block.parameters) {
    Awaited& awaited = parameters_[number];
    check(awaited);
    if (awaited.value.defined()) awaited.parameter.copy_(awaited.value);
    awaited.value.reset();
  }
}

void DeferredBlocks::check(const Awaited& awaited) const {
  const at::Tensor& now = awaited.parameter;
  const bool is_alike = now.sizes() == at::IntArrayRef(awaited.sizes) &&
                        now.scalar_type() == c10::typeMetaToScalarType(awaited.kind.dtype()) &&
                        now.device() == awaited.kind.device();
  require(is_alike, "ShardsOptions::materialize made parameter ", awaited.name, " ", now.scalar_type(),
          " of shape ", now.sizes(), " on ", now.device().str(), ", but it was ", awaited.kind.dtype().name(),
          " of shape ", awaited.sizes, " on ", awaited.kind.device().str(), "; write values in place");
  const bool was_written = awaited.has_value || now._version() != awaited.version ||
                           now.storage().unsafeGetStorageImpl() != awaited.storage;
  require(was_written && !is_deferred(now), "ShardsOptions::materialize left parameter ", awaited.name,
          " without values; write to every parameter of the block, with operations of LibTorch");
}

}  // namespace pacer::detail
