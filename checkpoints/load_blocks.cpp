#include <pacer/checkpoints/load_blocks.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>

#include <pacer/checkpoints/detail/named_weights.h>
#include <pacer/checkpoints/detail/weights_files.h>
#include <pacer/core/error.h>
#include <pacer/files/safetensors.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer {
namespace {

// What is known of the files, from the first block on.
class BlockFiles {
 public:
  explicit BlockFiles(const std::string& path)
      : files_(detail::find_weights(path)),
        headers_(detail::read_headers(files_)),
        tensors_(detail::tensors_of(headers_)) {
    if (files_.checkpoint.empty()) return;
    // Compares checksums once. Afterwards what no block asks for is skipped.
    detail::read_values(files_, [](const std::string&, at::IntArrayRef) { return std::nullopt; });
    files_.checkpoint.clear();
  }

  void load(const DeferredBlock& block) const {
    NamedTensors wanted;
    for (const auto& item : block.module.named_parameters())
      add(block.name + "." + item.key(), item.value(), wanted);
    for (const auto& item : block.module.named_buffers()) {
      const std::string name = block.name + "." + item.key();
      if (item.value().defined() && tensors_.count(name) > 0) add(name, item.value(), wanted);
    }
    const at::NoGradGuard no_grad;
    for (const auto& [name, value] : read(wanted)) wanted.at(name).copy_(value);
  }

 private:
  // Throws where the files do not have the tensor, or have another one.
  void add(const std::string& name, const at::Tensor& own, NamedTensors& wanted) const {
    const auto found = tensors_.find(name);
    require(found != tensors_.end(), "cannot load ", name, " from ", files_.where,
            ": there is no such tensor; its names must be those of the model");
    const std::string reason = detail::misfit_in_file(name, own, found->second);
    require(reason.empty(), "cannot load weights from ", files_.where, ": ", reason);
    wanted.emplace(name, own);
  }

  // From those of the files that have one of them.
  NamedTensors read(const NamedTensors& wanted) const {
    detail::WeightsFiles some;
    some.where = files_.where;
    for (size_t i = 0; i < headers_.size(); ++i) {
      const bool has_one = std::any_of(wanted.begin(), wanted.end(), [&](const auto& item) {
        return headers_[i].find(item.first).has_value();
      });
      if (has_one) some.paths.push_back(files_.paths[i]);
    }
    return detail::read_values(some, [&](const std::string& name, at::IntArrayRef) {
      return wanted.count(name) > 0 ? std::optional(at::Device(at::kCPU)) : std::nullopt;
    });
  }

  detail::WeightsFiles files_;
  std::vector<SafetensorsFile> headers_;
  std::map<std::string, TensorView> tensors_;  // views of the headers
};

}  // namespace

MaterializeBlock load_blocks(const std::string& path) {
  struct Shared {
    std::mutex mutex;  // ranks may be threads
    std::unique_ptr<const BlockFiles> files;
  };
  return [path, shared = std::make_shared<Shared>()](const DeferredBlock& block) {
    const std::lock_guard<std::mutex> lock(shared->mutex);
    if (shared->files == nullptr) shared->files = std::make_unique<const BlockFiles>(path);
    shared->files->load(block);
  };
}

}  // namespace pacer
