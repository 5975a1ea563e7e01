// What ranks read from the store where they meet, written by whoever reached it: packed texts, who a rank is,
// the exchange of all ranks, who has left and why, and the file in which the ranks of one host have it all.
// The first byte says which of these reads the rest.
#include <optional>

#include <unistd.h>

#include <pacer/collectives/detail/file_store.h>
#include <pacer/collectives/detail/process_identity.h>
#include <pacer/collectives/detail/rank_health.h>
#include <pacer/collectives/detail/store.h>
#include <pacer/core/error.h>

#include "fuzz/harness.h"
#include "support/temporary_folder.h"

namespace pacer::fuzz {
namespace {

using namespace detail;
using namespace std::chrono_literals;

constexpr int kRanks = 3;

void check_packed(const std::string& text) {
  std::vector<std::string> texts;
  // Each text has at least 8 bytes here and up to 48 in memory.
  if (!accepts(8 * text.size(), [&] { texts = unpack(text); })) return;
  demand(pack(texts) == text, "texts differ after they were packed and unpacked again");
}

void check_member(const std::string& text) {
  std::optional<ProcessIdentity> process;
  accepts(2 * text.size(), [&] { process = ProcessIdentity::parse(text); });
  if (!process) return;
  const std::optional<ProcessIdentity> again = ProcessIdentity::parse(process->to_text());
  demand(again && again->to_text() == process->to_text(),
         "a rank differs after it was written and read again");
  process->has_ended(ProcessIdentity::myself(kRanks));
}

// The records of a key, as a rank finds them: the packed texts of the input are records, packed again.
std::shared_ptr<MemoryStore> store_with(const std::string& key, const std::vector<std::string>& records) {
  auto store = std::make_shared<MemoryStore>();
  for (const std::string& record : records) store->append(key, record);
  return store;
}

void check_exchange(const std::vector<std::string>& records, int rank) {
  if (records.empty()) return;  // others than rank 0 would wait for one
  const auto store = store_with(rank == 0 ? "here" : "here/all", records);
  const auto timeout = rank == 0 ? 0ms : 1h;
  StoreAllGather exchange{
      store, "here", rank, kRanks, "a place", timeout, [](const StoreAllGather::Texts&) {}};
  std::vector<std::string> texts;
  size_t bytes = 0;
  for (const std::string& record : records) bytes += record.size();
  // Texts are copied out of the store, unpacked, packed and kept.
  if (!accepts(64 * bytes, [&] { texts = exchange.run("own"); })) return;
  demand(texts.size() == kRanks, "an exchange gives other than one text of each rank");
}

void check_news(const std::vector<std::string>& records) {
  const std::vector<std::optional<ProcessIdentity>> processes(kRanks, ProcessIdentity());
  RankHealth rank_health(store_with("news", records), 0, processes, std::nullopt, "a place");
  // Never throws: what cannot be understood is trouble, too.
  const auto trouble = rank_health.find_trouble({0, 1, 2});
  if (!trouble) return;
  for (const int rank : trouble->ranks)
    demand(rank >= 0 && rank < kRanks, "a rank that there is not is suspected");
}

void check_file(const std::string& text) {
  static const testing::TemporaryFolder folder;
  const std::string path = folder.path("store");
  {
    const std::shared_ptr<FileStore> own = FileStore::open(path);
    own->append("key", "record");
  }
  if (::truncate(path.c_str(), text.size() % 2 == 0 ? 0 : 25) != 0) violation("cannot cut the file");
  std::FILE* const file = std::fopen(path.c_str(), "ab");
  std::fwrite(text.data(), 1, text.size(), file);
  std::fclose(file);
  accepts(8 * text.size(), [&] { FileStore::open(path)->read("key"); });
  ::unlink(path.c_str());
}

}  // namespace

std::vector<std::string> seeds() {
  const std::string own = ProcessIdentity::myself(kRanks).to_text();
  const auto rank = [&](const char* number) { return pack({"rank", number, own}); };
  return {"u" + pack({"a", "", "\n"}),
          "m" + own,
          "0" + pack({rank("1"), rank("2")}),
          "0" + pack({rank("1"), pack({"verdict", "rank 1 counts otherwise", "1", "2"})}),
          "1" + pack({pack({"all", own, own, own})}),
          "1" + pack({pack({"verdict", "rank 1 counts otherwise", "1"})}),
          "n" + pack({pack({"alive", "1"}), pack({"searched", "1"}), pack({"retired", "2"})}),
          "n" + pack({pack({"left", "1", "out of memory"})}),
          "n" + pack({pack({"failed", "2", "all_reduce", "no sign of life from rank 1", "1"})}),
          std::string("f") + std::string("pacer 2\n\3\0\0\0\3\0\0\0keyabc", 22)};
}

}  // namespace pacer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pacer;
  if (size == 0) return 0;
  const std::string text = fuzz::text_of(data + 1, size - 1);
  if (data[0] == 'u') fuzz::check_packed(text);
  if (data[0] == 'm') fuzz::check_member(text);
  if (data[0] == 'f') fuzz::check_file(text);
  if (data[0] != '0' && data[0] != '1' && data[0] != 'n') return 0;
  std::vector<std::string> records;
  try {
    records = detail::unpack(text);
  } catch (const Error&) {
    return 0;
  }
  if (data[0] == 'n') {
    fuzz::check_news(records);
  } else {
    fuzz::check_exchange(records, data[0] - '0');
  }
  return 0;
}
