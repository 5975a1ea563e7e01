// Records by which the writers of one checkpoint tell the process that completes it: whole or not there,
// taken once, and refused where they are damaged.
#include <string>

#include <pacer/core/error.h>
#include <pacer/files/save_records.h>

#include "support/catch.h"
#include "support/files/failing_file_system.h"
#include "support/files/memory_file_system.h"
#include "support/message_of.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;

SaveRecord sample_record() {
  return {{{"errors-rank-00001-of-00002.safetensors", 12345678901, checksum_of("a")},
           {"session-rank-00001-of-00002.safetensors", 0, checksum_of("b")}},
          ""};
}

void check_same(const SaveRecord& a, const SaveRecord& b) {
  CHECK(a.failure == b.failure);
  REQUIRE(a.files.size() == b.files.size());
  for (size_t i = 0; i < a.files.size(); ++i) {
    CHECK(a.files[i].name == b.files[i].name);
    CHECK(a.files[i].size == b.files[i].size);
    CHECK(a.files[i].checksum == b.files[i].checksum);
  }
}

}  // namespace

TEST_CASE("a record of a part is taken once, by its rank", "[core][checkpoint]") {
  MemoryFileSystem files;
  REQUIRE(make_folder(files, "/staging"));
  CHECK_FALSE(take_record("/staging", 1, files));
  leave_record("/staging", 1, sample_record(), files);
  leave_record("/staging", 12, {{}, "no space left"}, files);
  CHECK_FALSE(take_record("/staging", 2, files));
  const auto one = take_record("/staging", 1, files), twelve = take_record("/staging", 12, files);
  REQUIRE(one);
  REQUIRE(twelve);
  check_same(*one, sample_record());
  check_same(*twelve, {{}, "no space left"});
  CHECK_FALSE(take_record("/staging", 1, files));
  CHECK(list_folder(files, "/staging").empty());
}

TEST_CASE("a record that is damaged anywhere is refused", "[core][checkpoint]") {
  MemoryFileSystem files;
  REQUIRE(make_folder(files, "/staging"));
  leave_record("/staging", 0, sample_record(), files);
  const std::string path = "/staging/" + list_folder(files, "/staging").front();
  const std::string whole = files.content(path);
  for (size_t at = 0; at < whole.size(); ++at) {
    files.content(path) = whole;
    files.content(path)[at] ^= 1;
    CHECK_THROWS_WITH(take_record("/staging", 0, files), ContainsSubstring(path));
    files.content(path) = whole.substr(0, at);
    CHECK_THROWS_WITH(take_record("/staging", 0, files), ContainsSubstring(path));
  }
}

TEST_CASE("a record that is whole but of something else is refused", "[core][checkpoint]") {
  const std::string good = "model.safetensors 4096 " + checksum_of("a");
  for (const std::string& text : {std::string("failed\n"), std::string("model.safetensors\n"),
                                  good + "\na b c\n", "model.safetensors -1 " + checksum_of("a") + '\n',
                                  "../model.safetensors 1 " + checksum_of("a") + '\n'}) {
    CAPTURE(text);
    MemoryFileSystem files;
    REQUIRE(make_folder(files, "/staging"));
    files.content("/staging/.part-of-rank-0") = text + checksum_of(text) + '\n';
    CHECK_THROWS_WITH(take_record("/staging", 0, files),
                      ContainsSubstring("/staging/.part-of-rank-0 is damaged"));
  }
}

TEST_CASE("a record whose n-th call fails is whole or not there, for every n", "[core][checkpoint]") {
  for (int64_t call = 1;; ++call) {
    CAPTURE(call);
    MemoryFileSystem under;
    REQUIRE(make_folder(under, "/staging"));
    FailingFileSystem files(under);
    files.arm(call, Fault::dead);
    const std::string message =
        message_of<FileError>([&] { leave_record("/staging", 3, sample_record(), files); });
    const auto record = take_record("/staging", 3, under);
    CHECK((record.has_value() || !message.empty()));
    if (record) check_same(*record, sample_record());
    if (!files.has_failed()) break;
  }
}

}  // namespace pacer::testing
