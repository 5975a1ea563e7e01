#include <pacer/files/tensorboard_events.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include <pacer/core/error.h>
#include <pacer/files/crc32c.h>
#include <pacer/files/file_descriptor.h>
#include <pacer/files/json_writer.h>
#include <pacer/files/utf8.h>

namespace pacer {
namespace {

constexpr size_t kHeldBackAtMost = size_t{64} << 10;

// Keys of protobuf fields: number * 8 + wire type. Types: 0 varint, 1 eight bytes, 2 length and bytes, 5 four
// bytes.
constexpr char kEventWallTime = 1 * 8 + 1;
constexpr char kEventStep = 2 * 8 + 0;
constexpr char kEventFileVersion = 3 * 8 + 2;
constexpr char kEventSummary = 5 * 8 + 2;
constexpr char kEventSessionLog = 7 * 8 + 2;
constexpr std::string_view kStatusStart("\x08\x01", 2);  // of a SessionLog: field 1, of type 0, is START
constexpr char kSummaryValue = 1 * 8 + 2;
constexpr char kValueTag = 1 * 8 + 2;
constexpr char kValueSimpleValue = 2 * 8 + 5;

template <class Bits>
std::string little_endian(Bits bits) {
  std::string bytes;
  for (size_t i = 0; i < sizeof bits; ++i) bytes += static_cast<char>(bits >> (8 * i) & 0xFF);
  return bytes;
}

template <class Bits, class Value>
std::string little_endian_bits(Value value) {
  static_assert(sizeof(Bits) == sizeof(Value));
  Bits bits;
  std::memcpy(&bits, &value, sizeof bits);
  return little_endian(bits);
}

std::string protobuf_varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>((value & 0x7F) | 0x80);
  return bytes + static_cast<char>(value);
}

std::string length_delimited(char key, std::string_view bytes) {
  return (key + protobuf_varint(bytes.size())).append(bytes);
}

std::string masked_crc(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return little_endian(((crc >> 15) | (crc << 17)) + 0xA282EAD8u);
}

std::string event_record(const std::string& payload) {
  const std::string length = little_endian(static_cast<uint64_t>(payload.size()));
  return length + masked_crc(length) + payload + masked_crc(payload);
}

std::string event_wall_time() {
  const std::chrono::duration<double> seconds = std::chrono::system_clock::now().time_since_epoch();
  return kEventWallTime + little_endian_bits<uint64_t>(seconds.count());
}

// The name of this machine as a part of a file name.
std::string host_name_part() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "localhost";
  std::string host = name.data();
  for (char& c : host) {
    if (c == '/') c = '-';
  }
  return host;
}

// Creates a folder and those above it where they are missing. By mkdir, not by std::filesystem: LibTorch's
// libraries export an incomplete copy of the latter, which a program can end up with.
void create_log_folders(const std::string& folder) {
  for (size_t end = 0; end != std::string::npos;) {
    end = folder.find('/', end + 1);
    mkdir(folder.substr(0, end).c_str(), 0777);  // mostly there already; only the last result matters
  }
  const int reason = errno;
  struct stat status {};
  const bool found = stat(folder.c_str(), &status) == 0;
  require<FileError>(found, "cannot create the folder \"", folder, "\": ", std::strerror(reason));
  require<FileError>(S_ISDIR(status.st_mode), "cannot create the folder \"", folder,
                     "\": there is a file of that name");
}

}  // namespace

TensorBoardFile::TensorBoardFile(const std::string& folder) {
  create_log_folders(folder);
  const auto seconds =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch());
  const std::string stem = folder + (folder.back() == '/' ? "" : "/") + "events.out.tfevents." +
                           std::to_string(seconds.count()) + '.' + host_name_part() + '.' +
                           std::to_string(getpid()) + '.';
  held_back_ = event_record(event_wall_time() + length_delimited(kEventFileVersion, "brain.Event:2"));
  for (int number = 0; descriptor_ < 0; ++number) {
    path_ = stem + std::to_string(number);
    descriptor_ =
        above_standard_streams(open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666));
    const int reason = errno;
    require<FileError>(descriptor_ >= 0 || reason == EEXIST, "cannot create ", path_, ": ",
                       std::strerror(reason));
  }
}

TensorBoardFile::~TensorBoardFile() {
  try {
    flush();
  } catch (const FileError&) {  // a destructor cannot report it; flush() can
  }
  close(descriptor_);
}

void TensorBoardFile::add_scalar(std::string_view tag, int64_t step, float value) {
  require(!tag.empty(), "a TensorBoard curve needs a tag; it is empty");
  require(is_utf8(tag), "the TensorBoard tag ", json_quote(tag),
          " is not UTF-8; TensorBoard could not read it");
  const std::string point =
      length_delimited(kValueTag, tag) + kValueSimpleValue + little_endian_bits<uint32_t>(value);
  held_back_ += event_record(event_wall_time() + kEventStep + protobuf_varint(static_cast<uint64_t>(step)) +
                             length_delimited(kEventSummary, length_delimited(kSummaryValue, point)));
  if (held_back_.size() >= kHeldBackAtMost) flush();
}

void TensorBoardFile::add_start(int64_t step) {
  held_back_ += event_record(event_wall_time() + kEventStep + protobuf_varint(static_cast<uint64_t>(step)) +
                             length_delimited(kEventSessionLog, kStatusStart));
}

void TensorBoardFile::flush() {
  size_t written = 0;
  int reason = 0;
  while (written < held_back_.size() && reason == 0) {
    const ssize_t count = ::write(descriptor_, held_back_.data() + written, held_back_.size() - written);
    if (count >= 0) {
      written += static_cast<size_t>(count);
    } else if (errno != EINTR) {
      reason = errno;
    }
  }
  held_back_.erase(0, written);
  require<FileError>(reason == 0, "cannot write to ", path_, ": ", std::strerror(reason));
}

}  // namespace pacer
