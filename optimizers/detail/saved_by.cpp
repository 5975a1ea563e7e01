#include <pacer/optimizers/detail/saved_by.h>

#include <algorithm>
#include <map>

#include <ATen/ops/empty.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/option_fields.h>

namespace pacer::detail {

void require_same_optimizer(const std::string& saved, const std::string& own) {
  const std::string torchs = "torch::optim::";
  const std::map<std::string, const char*> takers = {{torchs + "Adam", "FusedAdam"},
                                                     {torchs + "AdamW", "FusedAdamW"},
                                                     {torchs + "SGD", "FusedSgd"},
                                                     {torchs + "RMSprop", "FusedRmsprop"}};
  const auto taker = takers.find(saved);
  require(
      saved == own, "the state to load was saved by ", saved, ", but this is ", own, "; go on with ", saved,
      taker != takers.end() ? concatenate(", or with ", taker->second, ", which takes its state over") : "");
}

void write_saved_by(const std::string& optimizer, NamedTensors& state) {
  at::Tensor name = at::empty({static_cast<int64_t>(optimizer.size())}, at::kByte);
  std::copy(optimizer.begin(), optimizer.end(), name.mutable_data_ptr<uint8_t>());
  state[kSavedBy] = name;
  state[kVersion] = number_tensor(kStateVersion);
}

int64_t version_of(const NamedTensors& state) {
  return state.count(kVersion) == 0 ? 1 : require_number<int64_t>(state, kVersion);
}

std::string saved_by(const NamedTensors& state) {
  const int64_t version = version_of(state);
  if (state.count(kSavedBy) == 0 && version < kNamesSince) return "";
  const at::Tensor name = require_tensor(state, kSavedBy);
  require(name.scalar_type() == at::kByte && name.dim() == 1 && name.device().is_cpu(), "\"", kSavedBy,
          "\" of the state to load is no text, but ", name.scalar_type(), " of shape ", name.sizes());
  const at::Tensor dense = name.contiguous();
  const auto* text = dense.const_data_ptr<uint8_t>();
  return {text, text + dense.numel()};
}

}  // namespace pacer::detail
