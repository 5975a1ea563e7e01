// model.safetensors.index.json of a folder as Hugging Face has it.
#include <algorithm>
#include <optional>

#include <pacer/checkpoints/detail/weights_index.h>
#include <pacer/files/json_writer.h>

#include "fuzz/harness.h"

namespace pacer::fuzz {
namespace {

using detail::WeightsIndex;

const std::string kPath = "model.safetensors.index.json";

std::string written(const WeightsIndex& index) {
  std::string text;
  index.for_each([&](std::string_view tensor, std::string_view file) {
    text += (text.empty() ? "" : ",\n") + json_quote(tensor) + ": " + json_quote(file);
  });
  return R"({"metadata": {"total_size": 1}, "weight_map": {)" + text + "}}";
}

void check(const WeightsIndex& index) {
  const std::vector<std::string_view> files = index.files();
  index.for_each([&](std::string_view tensor, std::string_view file) {
    demand(index.file_of(tensor) == file, "a tensor of the index is not found in it");
    demand(std::find(files.begin(), files.end(), file) != files.end(), "a file is not listed");
    demand(file.find('/') == std::string_view::npos, "a file of the index is outside its folder");
  });
  const std::string text = written(index);
  const WeightsIndex again = WeightsIndex::parse({text.begin(), text.end()}, kPath);
  demand(written(again) == text, "an index differs after it was written and read again");
}

}  // namespace

std::vector<std::string> seeds() {
  std::string entries;
  for (int i = 0; i < 75000; ++i) entries += ",\"" + std::to_string(i) + "\":\"a\"";
  return {R"({"metadata": {"total_size": 8}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})",
          R"({"weight_map":{)" + entries.substr(1) + "}}"};
}

}  // namespace pacer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pacer;
  std::vector<char> text = fuzz::bytes_of(data, size);
  std::optional<fuzz::WeightsIndex> index;
  const bool accepted =
      fuzz::accepts(size, [&] { index = fuzz::WeightsIndex::parse(std::move(text), fuzz::kPath); });
  if (accepted && size <= 1 << 16) fuzz::check(*index);
  return 0;
}
