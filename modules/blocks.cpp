#include <pacer/modules/blocks.h>

#include <algorithm>

namespace pacer {
namespace {

constexpr const char* kLevels[] = {"drops", "recomputes", "gathers"};

}  // namespace

void BlocksImpl::wrap(WrapperLevel level, std::shared_ptr<BlockWrapper> wrapper) {
  require(this->wrapper(level) == nullptr, "another hook ", kLevels[static_cast<size_t>(level)],
          " these Blocks already; use one, in one Session at a time");
  this->wrapper(level) = std::move(wrapper);
}

void BlocksImpl::check_index(size_t i) const {
  require(i < size(), "Blocks has ", size(), " blocks and no block ", i, "; count from 0");
}

bool BlocksImpl::is_wrapped() const {
  return std::any_of(wrappers_.begin(), wrappers_.end(),
                     [](const auto& wrapper) { return wrapper != nullptr; });
}

Tensors BlocksImpl::run_wrapped(size_t i, size_t results, TensorFunction block, const Tensors& x) {
  for (size_t level = wrappers_.size(); level-- > 0;) {
    if (!wrappers_[level]) continue;
    block = [i, results, module = ptr(i), wrapper = wrappers_[level],
             rest = std::move(block)](const Tensors& in) {
      return wrapper->run({i, module, results}, rest, in);
    };
  }
  return block(x);
}

std::shared_ptr<torch::nn::Module> BlocksImpl::clone(const std::optional<torch::Device>& device) const {
  auto copy = std::make_shared<BlocksImpl>();
  for (const auto& block : *this) copy->push_back(block->clone(device));
  return copy;
}

void BlocksImpl::pretty_print(std::ostream& stream) const { stream << "pacer::Blocks"; }

}  // namespace pacer
