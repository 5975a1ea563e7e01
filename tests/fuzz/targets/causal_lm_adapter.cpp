// load_adapter into a CausalLm, with folders that nobody vouches for: layers are joined of parts that have
// transformers' names. What is refused leaves the model as it was, to the bit, and what is loaded is finite and can
// be written again. Needs LibTorch, which is not instrumented, so this target has no libFuzzer. The first byte says
// what the rest is: an adapter's matrices (m, n), its options (c, d), or changes of tensors of good matrices (t, u),
// for a model without (m, c, t) or with an adapter.
#include <filesystem>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>

#include <pacer/checkpoints/adapter_files.h>
#include <pacer/modules/causal_lm.h>
#include <pacer/modules/lora.h>

#include "fuzz/harness.h"
#include "support/checkpoints/weight_files.h"

namespace pacer::fuzz {
namespace {

using modules::CausalLm;

constexpr const char* kConfig = "/adapter_config.json";
constexpr const char* kMatrices = "/adapter_model.safetensors";

// Beside a file's bytes there are names, shapes and places of its tensors several times over.
constexpr size_t kCopies = 16;
// The adapters themselves: whatever r the options say, matrices of that many rows must be in the file.
constexpr size_t kModelBytes = 1 << 18;

const testing::TemporaryFolder& folders() {
  static const testing::TemporaryFolder folder;
  return folder;
}

CausalLm new_model(bool has_adapter) {
  torch::manual_seed(1);
  CausalLm model(modules::CausalLmOptions(12, 16, 1, 2).ffn(24).kv_heads(1));
  if (has_adapter) modules::add_lora(*model, modules::LoraOptions(2).alpha(6).targets({"layers.**"}));
  return model;
}

struct Files {
  std::string matrices, config;
};

// What this library writes of such a model.
Files saved() {
  static const Files files = [] {
    CausalLm model = new_model(true);
    const torch::NoGradGuard no_grad;
    for (const auto& item : modules::trainable(*model)) item.value().normal_();
    const std::string path = folders().path("saved");
    save_adapter(*model, path);
    return Files{testing::content_of(path + kMatrices), testing::content_of(path + kConfig)};
  }();
  return files;
}

void check_finite(const torch::nn::Module& model) {
  for (const auto& [name, tensor] : detail::model_tensors(model)) {
    if (!tensor.isfinite().all().item<bool>()) violation("a load has left " + name + " that is not finite");
  }
}

void check_load(const Files& files, bool has_adapter) {
  const std::string path = folders().path("hostile");
  std::filesystem::create_directories(path);
  testing::put_content(path + kMatrices, files.matrices);
  testing::put_content(path + kConfig, files.config);
  CausalLm model = new_model(has_adapter);
  const testing::ModelState before = testing::state_of_model(*model);
  const size_t bytes = kCopies * (files.matrices.size() + files.config.size()) + kModelBytes;
  if (accepts(bytes, [&] { load_adapter(*model, path); })) {
    check_finite(*model);
    return save_adapter(*model, folders().path("again"));
  }
  const std::string changed = testing::changed_since(*model, before);
  if (!changed.empty()) violation("a load that was refused has changed " + changed);
}

at::Tensor changed(const at::Tensor& tensor, uint8_t how, uint8_t by) {
  constexpr at::ScalarType kTypes[] = {at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kBool};
  constexpr double kValues[] = {0, 1e-45, 3e38, std::numeric_limits<double>::infinity(),
                                std::numeric_limits<double>::quiet_NaN()};
  if (tensor.dim() == 0 || tensor.size(0) == 0) return tensor;
  switch (how % 6) {
    case 0:
      return tensor.transpose(0, -1).contiguous();
    case 1:
      return tensor.to(kTypes[by % 5]);
    case 2:
      return tensor.narrow(0, 0, by % (tensor.size(0) + 1)).contiguous();
    case 3:
      return at::cat({tensor, tensor}, by % tensor.dim());
    case 4:
      return tensor.flatten();
    default:
      return at::full(tensor.sizes(), kValues[by % 5], at::kDouble).to(tensor.scalar_type());
  }
}

// Three bytes each: which tensor, what becomes of it, and how.
std::string changed_matrices(const std::string& changes) {
  saved();
  NamedTensors tensors = testing::tensors_in(folders().path("saved") + kMatrices);
  for (size_t i = 0; i + 2 < changes.size() && i < 24 && !tensors.empty(); i += 3) {
    const auto byte = [&](size_t k) { return static_cast<uint8_t>(changes[i + k]); };
    const auto at = [&](uint8_t number) {
      return std::next(tensors.begin(), static_cast<int64_t>(number % tensors.size()));
    };
    const auto item = at(byte(0));
    const auto other = at(byte(2));
    switch (byte(1) % 9) {
      case 0:
        tensors.erase(item);
        break;
      case 1:
        std::swap(item->second, other->second);
        break;
      case 2:
        tensors["base_model.model.model.layers." + std::to_string(byte(2) % 3) + item->first.substr(31)] =
            item->second;
        break;
      default:
        item->second = changed(item->second, byte(1) % 9, byte(2));
    }
  }
  const std::string path = folders().path("changed.safetensors");
  testing::put_tensors_in(path, tensors);
  return testing::content_of(path);
}

// The same options but for what comes first, which JSON's readers take for the only one or refuse.
std::string with_field(const std::string& field) { return '{' + field + ',' + saved().config.substr(1); }

}  // namespace

std::vector<std::string> seeds() {
  const Files files = saved();
  std::vector<std::string> all{"t", "u", "t012345678901", "u012345678901"};
  for (const char* into : {"m", "n"}) all.push_back(into + files.matrices);
  for (const char* into : {"c", "d"}) all.push_back(into + files.config);
  for (const char* field : {R"("rank_pattern":{"q_proj":3})", R"("alpha_pattern":{"gate_proj":1e-30})",
                            R"("r":4294967297)", R"("modules_to_save":["lm_head"])", R"("use_dora":true)"}) {
    all.push_back('c' + with_field(field));
  }
  return all;
}

}  // namespace pacer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pacer::fuzz;
  if (size == 0) return 0;
  const std::string text = text_of(data + 1, size - 1);
  if (data[0] == 'm' || data[0] == 'n') check_load({text, saved().config}, data[0] == 'n');
  if (data[0] == 't' || data[0] == 'u') check_load({changed_matrices(text), saved().config}, data[0] == 'u');
  if (data[0] == 'c' || data[0] == 'd') check_load({saved().matrices, text}, data[0] == 'd');
  return 0;
}
