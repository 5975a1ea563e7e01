// The header reader of safetensors files. What it accepts is written again, in another order and with other
// spaces, and read to the same.
#include <map>

#include <pacer/files/safetensors.h>

#include "fuzz/harness.h"
#include "support/files/memory_file_system.h"
#include "support/files/safetensors_text.h"

namespace pacer::fuzz {
namespace {

const std::string kPath = "model.safetensors";

struct Content {
  Dtype dtype;
  std::vector<int64_t> shape;
  std::string elements;
  bool operator==(const Content& other) const {
    return dtype == other.dtype && shape == other.shape && elements == other.elements;
  }
};

std::map<std::string, Content> contents_of(const SafetensorsFile& file) {
  std::map<std::string, Content> contents;
  for (const std::string_view name : file.names()) {
    const TensorView view = *file.find(name);
    std::string elements = view.data == nullptr ? "" : std::string(view.data, view.bytes);
    contents.emplace(name, Content{view.dtype, view.shape, std::move(elements)});
  }
  return contents;
}

std::map<std::string, std::string> metadata_of(const SafetensorsFile& file) {
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : file.metadata()) metadata.emplace(key, value);
  return metadata;
}

void check_round_trip(const SafetensorsFile& file) {
  const std::map<std::string, Content> contents = contents_of(file);
  std::vector<TensorBytes> tensors;
  demand(contents.size() == file.names_in_file_order().size(), "two tensors have one name");
  for (const auto& [name, content] : contents) {
    if (content.dtype == Dtype::OTHER) return;  // it cannot be written
    tensors.push_back({name, content.dtype, content.shape, content.elements.data()});
  }
  const auto metadata = metadata_of(file);
  const SafetensorsFile again = testing::parsed_safetensors(testing::written_safetensors(tensors, metadata));
  demand(contents_of(again) == contents, "tensors differ after they were written and read again");
  demand(metadata_of(again) == metadata, "metadata differ after they were written and read again");
}

// The tensors lie one after the other, from the header to the end of the file.
void check_places(const SafetensorsFile& file, size_t header, size_t size) {
  const char* end = nullptr;
  size_t bytes = 0;
  for (const std::string_view name : file.names_in_file_order()) {
    const TensorView view = *file.find(name);
    demand(end == nullptr || view.data == end, "tensors overlap, or there is a gap between them");
    end = view.data + view.bytes;
    bytes += view.bytes;
  }
  demand(8 + header + bytes == size, "the tensors are not all of the file behind its header");
}

// Reading the header alone refuses the same files in the same words.
void check_header_alone(const std::vector<char>& bytes, bool was_accepted) {
  testing::MemoryFileSystem files;
  files.content(kPath) = {bytes.begin(), bytes.end()};
  const bool accepted = accepts(2 * bytes.size(), [&] {
    FileReader reader(files, kPath);
    SafetensorsFile::read_header(reader, kPath);
  });
  demand(accepted == was_accepted, "the header alone is read otherwise than the whole file");
}

}  // namespace

std::vector<std::string> seeds() {
  const double values[] = {1, 2, 3};
  const std::vector<TensorBytes> tensors = {{"layer.weight", Dtype::F32, {2, 3}, values},
                                            {"layer.bias", Dtype::F64, {3}, values},
                                            {"scale", Dtype::BF16, {}, values},
                                            {"empty", Dtype::I8, {0, 4}, nullptr}};
  std::string entries, dimensions;
  for (int i = 0; i < 15000; ++i) {
    entries += ",\"" + std::to_string(i) + R"(":{"dtype":"I8","shape":[0],"data_offsets":[0,0]})";
  }
  for (int i = 0; i < 400000; ++i) dimensions += "1,";
  return {testing::written_safetensors(tensors, {{"format", "pt"}, {"\u00e9", "\n"}}),
          testing::safetensors_text('{' + entries.substr(1) + '}', 0),
          testing::safetensors_text(
              R"({"a":{"dtype":"U8","shape":[)" + dimensions + R"(1],"data_offsets":[0,1]}})", 1)};
}

}  // namespace pacer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pacer;
  const std::vector<char> bytes = fuzz::bytes_of(data, size);
  std::vector<char> copy = bytes;
  std::optional<SafetensorsFile> file;
  const bool accepted = fuzz::accepts(size, [&] {
    file = SafetensorsFile::parse(std::move(copy), fuzz::kPath);
    for (const std::string_view name : file->names()) file->find(name);
  });
  if (accepted) {
    uint64_t header = 0;
    for (size_t i = 8; i-- > 0;) header = header << 8 | data[i];
    fuzz::check_places(*file, header, size);
    fuzz::check_round_trip(*file);
  }
  file.reset();
  fuzz::check_header_alone(bytes, accepted);
  return 0;
}
