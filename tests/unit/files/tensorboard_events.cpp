// TensorBoard event files: taken apart again by a reader of its own, and what happens when they cannot be
// written. That TensorBoard reads them was checked with TensorBoard 2's event_file_loader.
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <ctime>
#include <limits>
#include <map>
#include <stdexcept>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

#include <pacer/core/error.h>
#include <pacer/files/crc32c.h>
#include <pacer/files/tensorboard_events.h>

#include "support/catch.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;

// Reads from the front of a text of bytes.
struct ByteReader {
  std::string rest;

  std::string take(size_t count) {
    if (count > rest.size()) throw std::runtime_error("the file ends in the middle of a record");
    std::string taken = rest.substr(0, count);
    rest.erase(0, count);
    return taken;
  }
  template <class Value>
  Value number() {  // this machine is little-endian, as is the file
    const std::string bytes = take(sizeof(Value));
    Value value;
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  uint64_t variable_number() {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
  }
};

// Any protobuf message: field number to bytes; numbers of variable length as eight bytes.
std::map<uint64_t, std::string> fields_of(const std::string& message) {
  std::map<uint64_t, std::string> fields;
  ByteReader reader{message};
  while (!reader.rest.empty()) {
    const uint64_t key = reader.variable_number();
    std::string& field = fields[key >> 3];
    switch (key & 7) {
      case 0: {
        const uint64_t value = reader.variable_number();
        field.assign(reinterpret_cast<const char*>(&value), sizeof value);
        break;
      }
      case 1:
        field = reader.take(8);
        break;
      case 2:
        field = reader.take(reader.variable_number());
        break;
      case 5:
        field = reader.take(4);
        break;
      default:
        throw std::runtime_error("a wire type that does not exist");
    }
  }
  return fields;
}

template <class Value>
Value value_of(const std::string& bytes) {
  ByteReader reader{bytes};
  return reader.number<Value>();
}

struct EventRead {
  double wall_time = 0;
  int64_t step = 0;
  std::string file_version, tag;
  float value = 0;
};

// The events of a file; throws where a checksum is wrong or a record is cut short.
std::vector<EventRead> events_of(const std::string& bytes) {
  const auto check = [](const std::string& data, uint32_t masked) {
    const uint32_t rotated = masked - 0xA282EAD8u;
    if (((rotated >> 17) | (rotated << 15)) != crc32c(data)) throw std::runtime_error("a wrong checksum");
  };
  std::vector<EventRead> events;
  ByteReader file{bytes};
  while (!file.rest.empty()) {
    const std::string length = file.take(8);
    check(length, file.number<uint32_t>());
    const std::string payload = file.take(value_of<uint64_t>(length));
    check(payload, file.number<uint32_t>());
    auto fields = fields_of(payload);
    EventRead event;
    event.wall_time = value_of<double>(fields.at(1));
    if (fields.count(2) != 0) event.step = value_of<int64_t>(fields.at(2));
    if (fields.count(3) != 0) event.file_version = fields.at(3);
    if (fields.count(5) != 0) {
      auto point = fields_of(fields_of(fields.at(5)).at(1));
      event.tag = point.at(1);
      event.value = value_of<float>(point.at(2));
    }
    events.push_back(event);
  }
  return events;
}

// While it lives, no file of this process grows beyond a size: writes fail as on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  void (*handler_)(int);
  rlimit before_{};
};

}  // namespace

TEST_CASE("scalars are read back from an event file", "[core][tensorboard]") {
  const TemporaryFolder folder;
  const double before = static_cast<double>(std::time(nullptr)) - 1;
  TensorBoardFile file(folder.path());
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::string long_tag(300, 't');
  file.add_scalar("loss", 0, 2.5f);
  file.add_scalar("loss", 127, -0.0f);
  file.add_scalar("loss", 128, kInfinity);
  file.add_scalar("l\xC3\xB6ss \xEF\xBF\xBD", std::numeric_limits<int64_t>::max(), std::nanf(""));
  file.add_scalar(long_tag, -1, 1e-45f);
  file.flush();

  const std::vector<EventRead> events = events_of(content_of(file.path()));
  REQUIRE(events.size() == 6);
  CHECK(events[0].file_version == "brain.Event:2");
  CHECK(events[1].tag == "loss");
  CHECK(events[1].step == 0);
  CHECK(events[1].value == 2.5f);
  CHECK(events[2].step == 127);
  CHECK(std::signbit(events[2].value));
  CHECK(events[3].step == 128);
  CHECK(events[3].value == kInfinity);
  CHECK(events[4].tag == "l\xC3\xB6ss \xEF\xBF\xBD");
  CHECK(events[4].step == std::numeric_limits<int64_t>::max());
  CHECK(std::isnan(events[4].value));
  CHECK(events[5].tag == long_tag);
  CHECK(events[5].step == -1);
  CHECK(events[5].value == 1e-45f);
  for (const EventRead& event : events) {
    CHECK(event.wall_time > before);
    CHECK(event.wall_time < before + 60);
  }
}

TEST_CASE("the first bytes are those of every event file", "[core][tensorboard]") {
  const TemporaryFolder folder;
  TensorBoardFile file(folder.path());
  file.flush();
  const std::string bytes = content_of(file.path());
  REQUIRE(bytes.size() == 12 + 24 + 4);
  // As in files that TensorFlow writes: the length 24, its checksum, the key of the wall time, 8 bytes of
  // time.
  CHECK(bytes.substr(0, 13) == std::string("\x18\0\0\0\0\0\0\0\xA3\x7F\x4B\x22\x09", 13));
  CHECK(bytes.substr(21, 15) ==
        "\x1A\x0D"
        "brain.Event:2");
}

TEST_CASE("every changed byte of an event file is noticed", "[core][tensorboard]") {
  const TemporaryFolder folder;
  TensorBoardFile file(folder.path());
  file.add_scalar("loss", 3, 0.5f);
  file.flush();
  const std::string bytes = content_of(file.path());
  REQUIRE_NOTHROW(events_of(bytes));
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string changed = bytes;
    changed[i] = static_cast<char>(changed[i] ^ 0x10);
    REQUIRE_THROWS_AS(events_of(changed), std::runtime_error);
  }
}

TEST_CASE("event files have names that TensorBoard finds and never share one", "[core][tensorboard]") {
  const TemporaryFolder folder;
  const std::string deeper = folder.path("runs/first");
  TensorBoardFile one(deeper), two(deeper + "/");
  CHECK(one.path() != two.path());
  for (const TensorBoardFile* file : {&one, &two}) {
    const std::string start = deeper + "/events.out.tfevents.";
    CHECK(file->path().substr(0, start.size()) == start);
    CHECK_THAT(file->path().substr(start.size()), ContainsSubstring('.' + std::to_string(getpid()) + '.'));
    CHECK(file->path().find('/', start.size()) == std::string::npos);
  }
}

TEST_CASE("held back events are written by flush, at 64 KiB and at the end", "[core][tensorboard]") {
  const TemporaryFolder folder;
  std::string path;
  {
    TensorBoardFile file(folder.path());
    path = file.path();
    for (int step = 0; step < 10'000; ++step) file.add_scalar("loss", step, static_cast<float>(step));
    CHECK(content_of(path).size() > size_t{256} << 10);
  }
  const std::vector<EventRead> events = events_of(content_of(path));
  REQUIRE(events.size() == 10'001);
  for (int step = 0; step < 10'000; ++step) REQUIRE(events[static_cast<size_t>(step) + 1].step == step);
}

TEST_CASE("a tag that TensorBoard cannot read is refused and leaves nothing behind", "[core][tensorboard]") {
  const TemporaryFolder folder;
  TensorBoardFile file(folder.path());
  CHECK_THROWS_AS(file.add_scalar("", 0, 1), InvalidArgument);
  CHECK_THROWS_WITH(file.add_scalar("lo\xFFss", 0, 1), ContainsSubstring("UTF-8"));
  CHECK_THROWS_AS(file.add_scalar("\xC3", 0, 1), InvalidArgument);
  CHECK_THROWS_AS(file.add_scalar("\xEF\xBF\xBD\xEF\xBF", 0, 1), InvalidArgument);
  file.flush();
  CHECK(events_of(content_of(file.path())).size() == 1);
}

TEST_CASE("an event file that cannot be created is named with the reason", "[core][tensorboard]") {
  const TemporaryFolder folder;
  const std::string occupied = folder.path("file");
  put_content(occupied, "x");
  CHECK_THROWS_AS(TensorBoardFile(occupied), FileError);
  CHECK_THROWS_WITH(TensorBoardFile(occupied), ContainsSubstring(occupied));
  CHECK_THROWS_WITH(TensorBoardFile(occupied + "/below"), ContainsSubstring(occupied + "/below"));
  CHECK_THROWS_AS(TensorBoardFile(""), FileError);
  CHECK_THROWS_AS(TensorBoardFile("/proc/self"), FileError);  // is there, but takes no file
}

TEST_CASE("an event file goes on where a full disk stopped it", "[core][tensorboard]") {
  const TemporaryFolder folder;
  TensorBoardFile file(folder.path());
  for (int step = 0; step < 100; ++step) file.add_scalar("loss", step, 1);
  {
    const FileSizeLimit limit(1'001);  // in the middle of a record
    CHECK_THROWS_AS(file.flush(), FileError);
    CHECK_THROWS_WITH(file.flush(),
                      ContainsSubstring(file.path()) && ContainsSubstring(std::strerror(EFBIG)));
    file.add_scalar("loss", 100, 1);
    CHECK(content_of(file.path()).size() == 1'001);
  }
  file.flush();
  const std::vector<EventRead> events = events_of(content_of(file.path()));
  REQUIRE(events.size() == 102);
  CHECK(events.back().step == 100);
}

}  // namespace pacer::testing
