// Damaged checkpoints: every flipped bit and every truncation of a file of 10 KB and of its manifest, and
// random edits, through open_checkpoint(), which must refuse each with a sentence; and the same into the
// safetensors reader alone, which must survive whatever it accepts. Worth a run under the address sanitizer.
#include <string>

#include <pacer/core/error.h>
#include <pacer/files/checkpoint_folder.h>
#include <pacer/files/safetensors.h>

#include "support/catch.h"
#include "support/checkpoints/checkpoint_samples.h"
#include "support/files/memory_file_system.h"
#include "support/files/safetensors_text.h"
#include "support/samples.h"

namespace pacer::testing {
namespace {

constexpr const char* kModelName = "model.safetensors";

// About 10 KB, with a dozen tensors of several dtypes.
std::string model_of_10_kilobytes() {
  static const std::string data = random_text(1, 4000);
  std::vector<TensorBytes> tensors;
  const Dtype dtypes[] = {Dtype::F32, Dtype::BF16, Dtype::F64, Dtype::U8};
  for (int64_t i = 0; i < 12; ++i) {
    tensors.push_back({"encoder.layer" + std::to_string(i) + ".weight", dtypes[i % 4], {i, 40}, data.data()});
  }
  return written_safetensors(tensors, {{"format", "pt"}});
}

// A checkpoint of that one file, whose bytes a test may change.
struct DamagedCheckpoint {
  MemoryFileSystem files;
  std::string folder = save_checkpoint(files, "/root", 1, {{kModelName, model_of_10_kilobytes()}});
  std::string& model = files.content(folder + '/' + kModelName);
  std::string& manifest = files.content(folder + "/manifest.json");

  // Whether it is refused by name, in a sentence of some length.
  bool is_refused(const char* name) {
    try {
      open_checkpoint(folder, files);
      return false;
    } catch (const FileError& error) {
      const std::string message = error.what();
      return message.find(folder + '/' + name) == 0 && message.size() > folder.size() + 40 &&
             files.open_descriptors() == 0;
    }
  }
};

// One to eight bytes, a removed or doubled stretch, two stretches swapped, or another text's stretch.
std::string randomly_edited(Samples& samples, std::string text, const std::string& other) {
  const auto place = [&] { return static_cast<size_t>(samples.below(static_cast<int64_t>(text.size()))); };
  const size_t at = place(), length = std::min(text.size() - at, static_cast<size_t>(1 + samples.below(300)));
  switch (samples.below(5)) {
    case 0:
      for (int64_t n = 1 + samples.below(8); n > 0; --n)
        text[place()] = static_cast<char>(samples.below(256));
      break;
    case 1:
      text.erase(at, length);
      break;
    case 2:
      text.insert(at, text.substr(at, length));
      break;
    case 3: {
      const std::string stretch = text.substr(at, length);
      text.erase(at, length);
      text.insert(static_cast<size_t>(samples.below(static_cast<int64_t>(text.size()) + 1)), stretch);
      break;
    }
    default:
      text.replace(at, length, other.substr(std::min(at, other.size()), length));
  }
  return text;
}

// Like an edit by someone who knows the header: digits, quotes and brackets become others.
std::string edited_header(Samples& samples, std::string text, size_t header_end) {
  const char alphabet[] = {'0', '1', '9', '"', '[', ']', '{', '}', ',', ':', '\\', ' ', 'F', 'a', '-', '.'};
  for (int64_t n = 1 + samples.below(4); n > 0; --n) {
    text[8 + static_cast<size_t>(samples.below(static_cast<int64_t>(header_end) - 8))] =
        samples.one_of(alphabet);
  }
  return text;
}

// Parses and, if that works, reads everything that the views promise. Returns whether it worked; false in
// `in_bounds` where the views contradict the file.
bool survives_parsing(const std::string& text, bool& in_bounds) {
  try {
    const SafetensorsFile file = parsed_safetensors(text);
    size_t data = 0, sum = 0;
    for (const std::string_view name : file.names()) {
      const auto tensor = file.find(name);
      if (!tensor) {
        in_bounds = false;
        break;
      }
      size_t bytes = static_cast<size_t>(dtype_bytes(tensor->dtype));
      for (const int64_t size : tensor->shape) bytes *= static_cast<size_t>(size);
      in_bounds = in_bounds && (tensor->dtype == Dtype::OTHER || bytes == tensor->bytes);
      data += tensor->bytes;
      for (size_t i = 0; i < tensor->bytes; ++i) sum += static_cast<unsigned char>(tensor->data[i]);
    }
    for (const auto& [key, value] : file.metadata()) sum += key.size() + value.size();
    in_bounds = in_bounds && data < text.size() && sum > 0;
    return true;
  } catch (const FileError&) {
    return false;
  }
}

size_t header_end_of(const std::string& text) { return text.find("}}") + 2; }

}  // namespace

TEST_CASE("every flipped bit and every truncation of a checkpoint is refused", "[core][checkpoint]") {
  DamagedCheckpoint checkpoint;
  REQUIRE(checkpoint.model.size() > 9000);
  REQUIRE_FALSE(checkpoint.is_refused(kModelName));
  const std::pair<std::string*, const char*> files[] = {{&checkpoint.model, kModelName},
                                                        {&checkpoint.manifest, "manifest.json"}};
  int64_t cases = 0, loaded = 0;
  for (const auto& [text, name] : files) {
    for (size_t bit = 0; bit < 8 * text->size(); ++bit, ++cases) {
      char& byte = (*text)[bit / 8];
      byte = static_cast<char>(byte ^ (1 << (bit % 8)));
      loaded += !checkpoint.is_refused(name);
      byte = static_cast<char>(byte ^ (1 << (bit % 8)));
    }
    const std::string whole = *text;
    for (size_t size = 0; size < whole.size(); ++size, ++cases) {
      *text = whole.substr(0, size);
      loaded += !checkpoint.is_refused(name);
    }
    *text = whole;
    for (const std::string& more : {std::string(1, '\0'), std::string("\n"), whole}) {
      *text = whole + more;
      loaded += !checkpoint.is_refused(name);
      ++cases;
    }
    *text = whole;
  }
  CHECK(loaded == 0);
  CHECK(cases > 90000);
  CHECK_FALSE(checkpoint.is_refused(kModelName));
}

TEST_CASE("random edits of a checkpoint are refused", "[core][checkpoint]") {
  DamagedCheckpoint checkpoint;
  const std::string model = checkpoint.model, manifest = checkpoint.manifest;
  Samples samples(1);
  int64_t loaded = 0;
  for (int i = 0; i < 100000; ++i) {
    const bool in_model = i % 2 == 0;
    const std::string& whole = in_model ? model : manifest;
    std::string& text = in_model ? checkpoint.model : checkpoint.manifest;
    text = randomly_edited(samples, whole, in_model ? manifest : model);
    if (text != whole) loaded += !checkpoint.is_refused(in_model ? kModelName : "manifest.json");
    text = whole;
  }
  CHECK(loaded == 0);
}

TEST_CASE("damaged safetensors are parsed or refused, never read out of bounds", "[core][safetensors]") {
  const std::string whole = model_of_10_kilobytes();
  const size_t header_end = header_end_of(whole);
  bool in_bounds = true;
  int64_t accepted_flips = 0, accepted_truncations = 0, accepted_edits = 0;
  REQUIRE(survives_parsing(whole, in_bounds));
  std::string text = whole;
  // Of the data one flip says as much as any: nothing but the checksum can see it.
  for (size_t bit = 0; bit < 8 * (header_end + 16); ++bit) {
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << (bit % 8)));
    accepted_flips += survives_parsing(text, in_bounds);
    text[bit / 8] = whole[bit / 8];
  }
  for (size_t size = 0; size < whole.size(); ++size) {
    accepted_truncations += survives_parsing(whole.substr(0, size), in_bounds);
  }
  Samples samples(2);
  const int edits = wants_long_tests() ? 2000000 : 50000;
  for (int i = 0; i < edits; ++i) {
    accepted_edits += survives_parsing(i % 2 == 0 ? edited_header(samples, whole, header_end)
                                                  : randomly_edited(samples, whole.substr(0, 1200), whole),
                                       in_bounds);
  }
  CHECK(in_bounds);
  CHECK(accepted_truncations == 0);
  CHECK(accepted_flips > 100);  // letters of names, and the data
  CHECK(accepted_edits > 100);
}

}  // namespace pacer::testing
