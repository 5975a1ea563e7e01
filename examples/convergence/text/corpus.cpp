// Reading files and folders, and drawing sequences from them.
#include "corpus.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <pacer/core/error.h>
#include <pacer/core/philox.h>

#include "convergence/format.h"

namespace convergence {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kValidationShare = 10;  // one byte in ten
constexpr uintmax_t kLargestHeader =
    128 << 10;  // larger ones are generated tables that repeat one line for megabytes
constexpr uint32_t kBatchStream = 0xFFu << 24;  // keeps these draws apart from the library's own streams

struct NamedFile {
  uint64_t order;
  std::string name;  // relative to the folder, with forward slashes
};

// A fixed hash, the same on every machine: FNV-1a, then the mix of splitmix64, without which names that
// differ in their last letters only would stay neighbours.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 14695981039346656037ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9ull;
  hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EBull;
  return hash ^ (hash >> 31);
}

bool is_hidden(const fs::path& path) { return path.filename().string().front() == '.'; }

bool is_header(const fs::directory_entry& entry) {
  const std::string extension = entry.path().extension().string();
  std::error_code error;
  return (extension == ".h" || extension == ".hpp" || extension == ".cuh") &&
         entry.file_size(error) <= kLargestHeader;
}

std::vector<NamedFile> list_folder(const fs::path& folder, bool headers_only) {
  std::vector<NamedFile> files;
  std::error_code error, unreadable;  // the second for links that lead nowhere; they are passed over
  fs::recursive_directory_iterator entry(folder, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    if (is_hidden(entry->path())) {
      entry.disable_recursion_pending();
    } else if (entry->is_regular_file(unreadable) && (!headers_only || is_header(*entry))) {
      const std::string name = entry->path().lexically_relative(folder).generic_string();
      files.push_back({hash_of(name), name});
    }
  }
  pacer::require(!error, "cannot read the folder ", folder.string(), ": ", error.message());
  std::sort(files.begin(), files.end(), [](const NamedFile& left, const NamedFile& right) {
    return left.order != right.order ? left.order < right.order : left.name < right.name;
  });
  return files;
}

// Appends up to `limit - bytes->size()` bytes of the file.
void append_file(const fs::path& path, int64_t limit, std::vector<uint8_t>* bytes) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  pacer::require(file.is_open(), "cannot open ", path.string(), ": ", std::strerror(errno));
  const auto held = static_cast<int64_t>(bytes->size());
  const int64_t wanted = std::min<int64_t>(file.tellg(), limit - held);
  bytes->resize(static_cast<size_t>(held + wanted));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(bytes->data()) + held, wanted);
  pacer::require(!file.fail(), "cannot read ", path.string());
}

void append_folder(const fs::path& folder, bool headers_only, int64_t limit, Corpus* corpus) {
  int64_t files = 0;
  for (const NamedFile& file : list_folder(folder, headers_only)) {
    const auto before = corpus->bytes.size();
    if (static_cast<int64_t>(before) >= limit) break;
    append_file(folder / file.name, limit, &corpus->bytes);
    if (std::find(corpus->bytes.begin() + before, corpus->bytes.end(), 0) != corpus->bytes.end()) {
      corpus->bytes.resize(before);  // not text
    } else {
      ++files;
    }
  }
  corpus->description = with_thousands(files) + " files in " + folder.string();
}

// A number in [0, count), from 64 random bits.
int64_t scale_to(uint64_t bits, int64_t count) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<int64_t>((static_cast<Wide>(bits) * static_cast<uint64_t>(count)) >> 64);
}

}  // namespace

Corpus read_corpus(const std::string& path, int64_t limit, int64_t sequence) {
  const bool own_headers = path.empty();
  const fs::path source = own_headers ? fs::path(PACER_TORCH_INCLUDE_DIR) : fs::path(path);
  const std::string advice = own_headers ? "; name another text with --data" : "";
  std::error_code error;
  const fs::file_status status = fs::status(source, error);
  pacer::require(fs::exists(status), "there is no file or folder ", source.string(), advice);

  Corpus corpus;
  if (fs::is_directory(status)) {
    append_folder(source, own_headers, limit, &corpus);
  } else {
    pacer::require(fs::is_regular_file(status), source.string(), " is neither a file nor a folder");
    append_file(source, limit, &corpus.bytes);
    corpus.description = source.string();
  }
  const auto size = static_cast<int64_t>(corpus.bytes.size());
  pacer::require(size > 0, "there is no text in ", source.string(), advice);
  corpus.validation_sequences = size / kValidationShare / sequence;
  pacer::require(corpus.validation_sequences >= 1, source.string(), " holds ", with_thousands(size),
                 " bytes; with sequences of ", sequence, " bytes at least ",
                 with_thousands(kValidationShare * sequence), " are needed");
  corpus.training_bytes = size - (corpus.validation_sequences * sequence + 1);
  corpus.description = with_thousands(size) + " bytes of " + corpus.description;
  return corpus;
}

std::vector<int64_t> batch_offsets(uint64_t seed, int64_t step, int64_t batch, const Corpus& corpus,
                                   int64_t sequence) {
  std::vector<int64_t> offsets;
  for (int64_t i = 0; i < batch; ++i) {
    const auto number = static_cast<uint64_t>(step);
    const pacer::PhiloxCounter counter = {{static_cast<uint32_t>(i), static_cast<uint32_t>(number >> 32),
                                           static_cast<uint32_t>(number), kBatchStream}};
    const auto draw = pacer::philox4x32_10(pacer::philox_key(seed), counter);
    const uint64_t bits = draw.word[0] | static_cast<uint64_t>(draw.word[1]) << 32;
    offsets.push_back(scale_to(bits, corpus.training_bytes - sequence));
  }
  return offsets;
}

std::vector<int64_t> validation_offsets(const Corpus& corpus, int64_t count, int64_t sequence) {
  const int64_t kept = std::min(count, corpus.validation_sequences);
  std::vector<int64_t> offsets;
  for (int64_t i = 0; i < kept; ++i) {
    offsets.push_back(corpus.training_bytes + i * corpus.validation_sequences / kept * sequence);
  }
  return offsets;
}

}  // namespace convergence
