#include <pacer/modules/detail/region_buffers.h>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <pacer/modules/detail/buffer_names.h>
#include <pacer/modules/detail/model_modules.h>

namespace pacer::detail {

RegionBuffers::RegionBuffers(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  const auto buffers = module.named_buffers();
  if (buffers.is_empty()) return;
  const auto codes = nf4_buffers(module);  // most of what a block has, and no forward writes to them
  for (const auto& item : buffers) {
    const at::Tensor& buffer = item.value();
    if (!buffer.defined()) continue;
    const bool is_constant = codes.count(buffer.unsafeGetTensorImpl()) != 0;
    buffers_.push_back({item.key(), buffer, is_constant ? at::Tensor() : buffer.clone(), buffer._version()});
  }
}

void RegionBuffers::keep_changed() {
  for (Buffer& buffer : buffers_) {
    const int64_t version = buffer.tensor._version();
    if (version == buffer.version && !is_running_statistic(buffer.name)) buffer.before.reset();
    buffer.version = version;
  }
}

std::string RegionBuffers::changed_by_others() const {
  for (const Buffer& buffer : buffers_) {
    if (!buffer.before.defined() && buffer.tensor._version() != buffer.version) return buffer.name;
  }
  return "";
}

// Other memory rather than other values: graphs that saved a buffer keep what they saved, and its version.
RegionBuffers::AsBefore::AsBefore(const RegionBuffers& buffers) : buffers_(buffers) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> before;
  for (const Buffer& buffer : buffers.buffers_) {
    if (!buffer.before.defined()) continue;
    before.push_back(buffer.before.clone());
    now_.push_back(buffer.tensor.tensor_data());
  }
  exchange(before);
}

RegionBuffers::AsBefore::~AsBefore() { exchange(now_); }

void RegionBuffers::AsBefore::exchange(const std::vector<at::Tensor>& values) const {
  size_t next = 0;
  for (const Buffer& buffer : buffers_.buffers_) {
    if (buffer.before.defined()) at::Tensor(buffer.tensor).set_data(values[next++]);
  }
}

}  // namespace pacer::detail
