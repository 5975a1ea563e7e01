#include <pacer/collectives/detail/store.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <thread>

#include <pacer/collectives/communication_error.h>
#include <pacer/collectives/detail/process_identity.h>
#include <pacer/collectives/detail/wait_notice.h>
#include <pacer/core/error.h>
#include <pacer/files/utf8.h>

namespace pacer::detail {

namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// How often who waits checks.
constexpr Milliseconds kCheck{1000};
// How often rank 0 looks for who is still missing: at first often, then more and more rarely.
constexpr Milliseconds kShortestPoll{2}, kLongestPoll{100};

// Records of an exchange: "rank" RANK TEXT under its key, "all" TEXT... under the key of its result, and
// "verdict" MESSAGE SUSPECT... under both.
std::string result_of(const std::string& key) { return key + "/all"; }

// The words of another rank, as one line that can be printed.
std::string one_line(std::string text) {
  const bool has_only_utf8 = is_utf8(text);
  for (char& c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) c = ' ';
    if (byte >= 0x80 && !has_only_utf8) c = '?';
  }
  return text.empty() ? "another rank gives no reason" : text;
}

void throw_verdict(const std::vector<std::string>& record) {
  require_record(record.size() >= 2);
  if (record[0] != "verdict") return;
  std::vector<int> suspects;
  for (size_t i = 2; i < record.size(); ++i) suspects.push_back(parse_rank(record[i]));
  fail_rendezvous(one_line(record[1]), suspects);
}

// The first text of each rank.
StoreAllGather::Texts texts_of(const std::vector<std::string>& records, int world_size) {
  StoreAllGather::Texts texts(static_cast<size_t>(world_size));
  for (const std::string& bytes : records) {
    const std::vector<std::string> record = unpack(bytes);
    throw_verdict(record);
    require_record(record.size() == 3 && record[0] == "rank");
    const auto rank = static_cast<size_t>(parse_rank(record[1]));
    if (rank < texts.size() && !texts[rank]) texts[rank] = record[2];
  }
  return texts;
}

std::vector<int> missing_from(const StoreAllGather::Texts& texts) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank]) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

}  // namespace

void MemoryStore::append(const std::string& key, const std::string& record) {
  count_requests(1);
  const std::lock_guard<std::mutex> lock(mutex_);
  records_[key].push_back(record);
  changed_.notify_all();
}

std::vector<std::string> MemoryStore::read(const std::string& key) {
  count_requests(1);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = records_.find(key);
  return found == records_.end() ? std::vector<std::string>() : found->second;
}

bool MemoryStore::wait_for(const std::string& key, std::chrono::milliseconds limit) {
  count_requests(1);
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, limit, [&] { return records_.count(key) != 0; });
}

std::string pack(const std::vector<std::string>& texts) {
  std::string bytes;
  for (const std::string& text : texts) {
    const uint64_t size = text.size();
    bytes.append(reinterpret_cast<const char*>(&size), sizeof(size));
    bytes += text;
  }
  return bytes;
}

std::vector<std::string> unpack(const std::string& bytes) {
  std::vector<std::string> texts;
  size_t offset = 0;
  while (offset < bytes.size()) {
    uint64_t size = 0;
    const size_t left = bytes.size() - offset;
    if (left >= sizeof(size)) std::memcpy(&size, bytes.data() + offset, sizeof(size));
    require_record(left >= sizeof(size) && size <= left - sizeof(size));
    texts.push_back(bytes.substr(offset + sizeof(size), size));
    offset += sizeof(size) + size;
  }
  return texts;
}

void require_record(bool holds) {
  require<Error>(holds, "the store where the ranks meet holds something else than their records");
}

int parse_rank(const std::string& text) {
  int rank = -1;
  const char* const end = text.data() + text.size();
  const auto number = std::from_chars(text.data(), end, rank);
  require_record(number.ec == std::errc() && number.ptr == end && rank >= 0);
  return rank;
}

std::vector<std::string> StoreAllGather::collect() const {
  const auto start = Clock::now();
  WaitNotice notice(rank, place, timeout, /*speaks=*/rank <= 1);
  while (true) {
    const Texts texts = texts_of(store->read(key), world_size);
    check(texts);
    const std::vector<int> missing = missing_from(texts);
    if (rank == 0 && missing.empty()) {
      std::vector<std::string> all{"all"};
      for (const auto& text : texts) all.push_back(*text);
      store->append(result_of(key), pack(all));
      return {all.begin() + 1, all.end()};
    }
    const auto waited = std::chrono::duration_cast<Milliseconds>(Clock::now() - start);
    if (waited >= timeout && !missing.empty()) {
      fail_rendezvous(concatenate("only ", texts.size() - missing.size(), " of ", texts.size(),
                                  " ranks came to ", place, " within ", timeout.count(), " ms, without ",
                                  names_of(missing), "; start them all, or set a longer timeout"),
                      missing);
    }
    if (waited >= timeout + kCheck) {
      fail_rendezvous(concatenate("all ranks came to ", place,
                                  ", but rank 0 did not say so in time; see what it printed"),
                      {0});
    }
    if (!missing.empty() && (rank == 0 || missing.front() == 0)) {
      notice.look(names_of(missing), "start them all, or see what they printed");
    }
    if (rank == 0) {
      std::this_thread::sleep_for(std::clamp(waited / 8, kShortestPoll, kLongestPoll));
    } else if (store->wait_for(result_of(key), std::clamp(timeout - waited, kLongestPoll, kCheck))) {
      const std::vector<std::string> records = store->read(result_of(key));
      if (records.empty()) continue;
      const std::vector<std::string> all = unpack(records.front());
      throw_verdict(all);
      require_record(all[0] == "all");
      if (all.size() != texts.size() + 1) {
        fail_rendezvous(concatenate("rank ", rank, " counts ", world_size, " ranks, but rank 0 counts ",
                                    all.size() - 1, "; start all ranks of a run with the same world size"),
                        {0});
      }
      return {all.begin() + 1, all.end()};
    }
  }
}

std::vector<std::string> StoreAllGather::run(const std::string& own) const {
  store->append(key, pack({"rank", std::to_string(rank), own}));
  try {
    return collect();
  } catch (const CommunicationError& error) {
    std::vector<std::string> verdict{"verdict", error.what()};
    for (const int suspect : error.suspected_ranks()) verdict.push_back(std::to_string(suspect));
    try {
      store->append(key, pack(verdict));
      store->append(result_of(key), pack(verdict));
    } catch (const std::exception&) {  // then the others find out by themselves
    }
    throw;
  }
}

}  // namespace pacer::detail
