// Records of the key "news", packed:
//   left RANK REASON                           the rank cannot go on
//   retired RANK                               its communicators have ended, and nothing had failed
//   alive RANK                                 the rank has noticed a failure, and is not its cause
//   searched RANK                              it has found alive all that it asked for
//   failed RANK OPERATION TEXT [SUSPECT...]    what it found out about that
#include <pacer/collectives/detail/roster.h>

#include <algorithm>
#include <thread>
#include <utility>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

const std::string kNews = "news";
// How long survivors wait for each other's sign of life, then for what the others find out, and the keeper
// for the others' retirement.
constexpr std::chrono::milliseconds kPatience{1000};
// From last words to the end of the store: the others notice the failure, and look for its cause for a
// second.
constexpr std::chrono::milliseconds kMourning{1500};

constexpr const char* kStoreGone =
    "rank 0, or the launcher, has ended: the store where the ranks met cannot be reached";

// 5 ms, 10 ms ... 80 ms: soon where the others are quick, and few times where they are not.
class Pauses {
 public:
  void pause() {
    std::this_thread::sleep_for(next_);
    next_ = std::min(2 * next_, std::chrono::milliseconds(80));
  }

 private:
  std::chrono::milliseconds next_{5};
};

}  // namespace

Roster::Roster(std::shared_ptr<Store> store, int rank, std::vector<std::optional<Member>> members,
               std::optional<int> keeper, std::string place)
    : store_(std::move(store)),
      rank_(rank),
      members_(std::move(members)),
      keeper_(keeper),
      place_(std::move(place)) {}

std::vector<std::shared_ptr<Roster>> Roster::of_threads(int world_size) {
  const auto store = std::make_shared<MemoryStore>();
  const std::vector<std::optional<Member>> members(static_cast<size_t>(world_size), Member());
  std::vector<std::shared_ptr<Roster>> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.push_back(std::make_shared<Roster>(store, rank, members, std::nullopt, "this process"));
  }
  return ranks;
}

Roster::~Roster() {
  const Clock::rep last_words = last_words_;
  if (last_words != 0 && keeper_ == rank_) {
    std::this_thread::sleep_until(Clock::time_point(Clock::duration(last_words)) + kMourning);
  }
}

bool Roster::is_one_host() const { return local_size() == static_cast<int>(members_.size()); }

int Roster::local_rank() const {
  return static_cast<int>(std::count_if(members_.begin(), members_.begin() + rank_, [&](const auto& member) {
    return member->network == own().network;
  }));
}

int Roster::local_size() const {
  return static_cast<int>(std::count_if(members_.begin(), members_.end(), [&](const auto& member) {
    return member->network == own().network;
  }));
}

int Roster::first_local_rank() const {
  const auto is_here = [&](const auto& member) { return member->network == own().network; };
  return static_cast<int>(std::find_if(members_.begin(), members_.end(), is_here) - members_.begin());
}

bool Roster::has_ended(int rank) const { return members_.at(static_cast<size_t>(rank))->has_ended(own()); }

void Roster::require_all_alive() const { require_alive(members_, own(), place_); }

// LibTorch would find out as well, but print many lines.
void Roster::require_keeper() const {
  require<Error>(!keeper_ || !has_ended(*keeper_), "the process of rank ", keeper_.value_or(0),
                 ", which kept the store, has ended");
}

void Roster::tell(const std::vector<std::string>& news) {
  require_keeper();
  store_->append(kNews, pack(news));
}

void Roster::leave(const std::string& reason) {
  tell({"left", std::to_string(rank_), reason});
  last_words_ = Clock::now().time_since_epoch().count();
}

void Roster::tell_failure(const std::string& operation, const Trouble& found) noexcept {
  try {
    std::vector<std::string> news{"failed", std::to_string(rank_), operation, found.text};
    for (const int rank : found.ranks) news.push_back(std::to_string(rank));
    tell(news);
    last_words_ = Clock::now().time_since_epoch().count();
  } catch (const std::exception&) {  // then the others find out by themselves
  }
}

struct Roster::Elsewhere {
  bool is_searching = false;  // a rank has noticed a failure, and somebody that it asks for is silent
  Trouble failure;            // the first for which a cause was found
};

// What is known of one rank.
struct Roster::Standing {
  int rank = 0;
  bool has_ended = false, is_alive = false, has_retired = false;
  std::optional<std::string> left;
  std::optional<std::string> failed;  // in which operation, and what it found out
  bool failed_with_others = false;    // than those that were asked for
};

// A record that was unpacked.
struct Roster::News {
  // Throws Error for what is no record of these ranks.
  News(const std::string& record, size_t world_size) : texts(unpack(record)) {
    require_record(texts.size() >= 2);
    rank = parse_rank(texts[1]);
    require_record(static_cast<size_t>(rank) < world_size && (!is("left") || texts.size() >= 3) &&
                   (!is("failed") || texts.size() >= 4));
    for (size_t i = 4; is("failed") && i < texts.size(); ++i) suspects.push_back(parse_rank(texts[i]));
  }
  bool is(const char* kind) const { return texts[0] == kind; }

  std::vector<std::string> texts;
  int rank = 0;
  std::vector<int> suspects;  // of "failed"
};

// Of these ranks, without this one. `elsewhere`, if there is one: what is known of all ranks together.
std::vector<Roster::Standing> Roster::standings(const std::vector<int>& ranks, Elsewhere* elsewhere) {
  require_keeper();
  std::vector<Standing> standings;
  std::vector<char> searches(members_.size(), 0);
  std::vector<Standing*> by_rank(members_.size());
  standings.reserve(ranks.size());
  for (const int rank : ranks) {
    if (rank == rank_) continue;
    // In this order: a process may tell and end between the two.
    Standing& standing = standings.emplace_back();
    standing.rank = rank;
    standing.has_ended = has_ended(rank);
    by_rank.at(static_cast<size_t>(rank)) = &standing;
  }
  const auto is_asked_for = [&](int rank) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  };
  for (const std::string& record : store_->read(kNews)) {
    const News news(record, members_.size());
    const std::vector<std::string>& texts = news.texts;
    const auto rank = static_cast<size_t>(news.rank);
    if (news.is("retired") && keeper_ == news.rank) keeper_has_retired_ = true;
    searches[rank] = news.is("alive") && news.rank != rank_ ? 1 : 0;
    if (elsewhere != nullptr && !news.suspects.empty() && elsewhere->failure.ranks.empty()) {
      elsewhere->failure = {{news.rank}, concatenate("rank ", rank, " failed in ", texts[2], ": ", texts[3])};
    }
    Standing* const standing = by_rank[rank];
    if (standing == nullptr) continue;
    if (news.is("alive") || news.is("failed")) standing->is_alive = true;
    if (news.is("retired")) standing->has_retired = true;
    if (news.is("left") && !standing->left) standing->left = texts[2];
    if (news.is("failed") && !standing->failed) {
      standing->failed = concatenate(texts[2], ": ", texts[3]);
      standing->failed_with_others = std::any_of(news.suspects.begin(), news.suspects.end(),
                                                 [&](int suspect) { return !is_asked_for(suspect); });
    }
  }
  if (elsewhere != nullptr) {
    elsewhere->is_searching = std::find(searches.begin(), searches.end(), 1) != searches.end();
  }
  return standings;
}

// Who has left, or ended without a word. Who was alive when others had failed is not the cause.
std::optional<Roster::Trouble> Roster::find_cause(const std::vector<Standing>& standings) {
  Trouble found;
  for (const Standing& standing : standings) {
    const bool has_vanished = standing.has_ended && !standing.is_alive && !standing.has_retired;
    if (!standing.left && !has_vanished) continue;
    found.ranks.push_back(standing.rank);
    found.text += concatenate(found.text.empty() ? "" : "; ", "rank ", standing.rank,
                              " left: ", standing.left.value_or("its process has ended"));
  }
  if (found.ranks.empty()) return std::nullopt;
  return found;
}

std::optional<Roster::Trouble> Roster::find_trouble(const std::vector<int>& ranks) {
  try {
    const std::vector<Standing> known = standings(ranks);
    if (auto cause = find_cause(known)) return cause;
    for (const Standing& standing : known) {
      if (standing.failed) {
        return Trouble{{standing.rank}, concatenate("rank ", standing.rank, " failed in ", *standing.failed)};
      }
    }
  } catch (const StoreSilent&) {  // a machine that was paused goes on later
  } catch (const std::exception& error) {
    if (!keeper_has_retired_) return Trouble{{0}, concatenate(kStoreGone, " (", error.what(), ")")};
  }
  return std::nullopt;
}

Roster::Trouble Roster::find_suspects(const std::vector<int>& ranks) noexcept {
  Trouble found;
  try {
    tell({"alive", std::to_string(rank_)});
    last_words_ = Clock::now().time_since_epoch().count();
    const auto end = Clock::now() + kPatience;
    bool has_searched = false;
    for (Pauses pauses;; pauses.pause()) {
      Elsewhere elsewhere;
      const std::vector<Standing> known = standings(ranks, &elsewhere);
      if (auto cause = find_cause(known)) return *cause;
      std::vector<int> silent, retired;
      for (const Standing& standing : known) {
        if (standing.failed_with_others) {
          found.ranks.push_back(standing.rank);
          found.text += concatenate(found.text.empty() ? "" : "; ", "rank ", standing.rank, " failed in ",
                                    *standing.failed);
        } else if (standing.has_retired) {
          retired.push_back(standing.rank);
        } else if (!standing.is_alive) {
          silent.push_back(standing.rank);
        }
      }
      if (!found.ranks.empty()) return found;
      if (!silent.empty() && Clock::now() < end) continue;
      if (!silent.empty()) return {silent, "no sign of life from " + names_of(silent)};
      // Nobody is silent here. Somebody may find the cause among ranks that this one does not ask for.
      if (!std::exchange(has_searched, true)) tell({"searched", std::to_string(rank_)});
      if (elsewhere.is_searching && Clock::now() < end + kPatience) continue;
      if (!elsewhere.failure.ranks.empty()) return elsewhere.failure;
      if (!retired.empty()) {
        const bool is_one = retired.size() == 1;
        return {retired, names_of(retired) +
                             (is_one ? " has ended its communicator" : " have ended their communicators")};
      }
      return found;
    }
  } catch (const StoreSilent&) {
    return {{}, "the store where the ranks met does not answer"};
  } catch (const std::exception&) {
    // The store is kept by rank 0, or by the launcher.
    return {rank_ == 0 ? std::vector<int>() : std::vector<int>{0}, kStoreGone};
  }
}

void Roster::retire() noexcept {
  if (last_words_ != 0) return;
  const auto end = Clock::now() + kPatience;
  try {
    tell({"retired", std::to_string(rank_)});
    if (keeper_ != rank_) return;
    const std::vector<int> all = all_ranks(static_cast<int>(members_.size()));
    for (Pauses pauses; Clock::now() < end; pauses.pause()) {
      const std::vector<Standing> known = standings(all);
      if (std::all_of(known.begin(), known.end(), [](const Standing& standing) {
            return standing.has_retired || standing.has_ended || standing.left;
          })) {
        return;
      }
    }
  } catch (const std::exception&) {  // then the others see that the process has ended
  }
}

}  // namespace pacer::detail
