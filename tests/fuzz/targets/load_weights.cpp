// load_weights and load_adapter with files that nobody vouches for: what is refused leaves the model as it
// was, to the bit. Needs LibTorch, which is not instrumented, so this target has no libFuzzer. The first byte
// says which file the rest is: weights, an adapter's matrices or its options.
#include <pacer/checkpoints/adapter_files.h>
#include <pacer/checkpoints/load_weights.h>

#include "fuzz/harness.h"
#include "support/checkpoints/weight_files.h"

namespace pacer::fuzz {
namespace {

const std::string kData = PACER_TEST_DATA;
constexpr const char* kConfig = "/adapter_config.json";
constexpr const char* kMatrices = "/adapter_model.safetensors";

// Beside a file's bytes there are names, shapes and places of its tensors several times over.
constexpr size_t kCopies = 16;

void check_load(size_t bytes, const std::function<void(testing::PeerNet&)>& load) {
  testing::PeerNet model;
  const testing::ModelState before = testing::state_of_model(*model);
  if (accepts(kCopies * bytes, [&] { load(model); })) return;
  const std::string changed = testing::changed_since(*model, before);
  if (!changed.empty()) violation("a load that was refused has changed " + changed);
}

const std::string& folder_of_adapter() {
  static const testing::TemporaryFolder folder;
  static const std::string path = folder.path();
  return path;
}

void check_adapter(const std::string& matrices, const std::string& config) {
  testing::put_content(folder_of_adapter() + kMatrices, matrices);
  testing::put_content(folder_of_adapter() + kConfig, config);
  check_load(matrices.size() + config.size(),
             [](testing::PeerNet& model) { load_adapter(*model, folder_of_adapter()); });
}

void check_weights(const std::string& text) {
  const std::string path = folder_of_adapter() + "/weights.safetensors";
  testing::put_content(path, text);
  check_load(text.size(), [&](testing::PeerNet& model) { load_weights(*model, path); });
}

std::string peft(const char* file) { return testing::content_of(kData + "/peft_adapter" + file); }

}  // namespace

std::vector<std::string> seeds() {
  const testing::PeerNet model;
  const std::string path = folder_of_adapter() + "/seed.safetensors";
  testing::put_tensors_in(path, detail::model_tensors(*model));
  return {'w' + testing::content_of(kData + "/bitsandbytes.safetensors"), 'w' + testing::content_of(path),
          'm' + peft(kMatrices), 'c' + peft(kConfig)};
}

}  // namespace pacer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pacer::fuzz;
  if (size == 0) return 0;
  const std::string text = text_of(data + 1, size - 1);
  if (data[0] == 'w') check_weights(text);
  if (data[0] == 'm') check_adapter(text, peft(kConfig));
  if (data[0] == 'c') check_adapter(peft(kMatrices), text);
  return 0;
}
