// Records of the key "news", packed:
//   left RANK REASON                           the rank cannot go on
//   retired RANK                               its communicators have ended, and nothing had failed
//   alive RANK                                 the rank has noticed a failure, and is not its cause
//   searched RANK                              it has found alive all that it asked for
//   failed RANK OPERATION TEXT [SUSPECT...]    what it found out about that
#include <pacer/collectives/detail/rank_health.h>

#include <algorithm>
#include <thread>
#include <utility>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

const std::string kStatusKey = "news";
// How long survivors wait for each other's sign of life, then for what the others find out, and the rank that
// holds the store for the others to leave.
constexpr std::chrono::milliseconds kPatience{1000};
// From a failure to the end of the store: the others notice it, and look for its cause for a second.
constexpr std::chrono::milliseconds kStoreOutlives{1500};

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

RankHealth::RankHealth(std::shared_ptr<Store> store, int rank,
                       std::vector<std::optional<ProcessIdentity>> processes, std::optional<int> store_host,
                       std::string place)
    : store_(std::move(store)),
      rank_(rank),
      processes_(std::move(processes)),
      store_host_(store_host),
      place_(std::move(place)) {}

std::vector<std::shared_ptr<RankHealth>> RankHealth::of_threads(int world_size) {
  const auto store = std::make_shared<MemoryStore>();
  const std::vector<std::optional<ProcessIdentity>> processes(static_cast<size_t>(world_size),
                                                              ProcessIdentity());
  std::vector<std::shared_ptr<RankHealth>> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.push_back(std::make_shared<RankHealth>(store, rank, processes, std::nullopt, "this process"));
  }
  return ranks;
}

RankHealth::~RankHealth() {
  const Clock::rep failed_at = failed_at_;
  if (failed_at != 0 && store_host_ == rank_) {
    std::this_thread::sleep_until(Clock::time_point(Clock::duration(failed_at)) + kStoreOutlives);
  }
}

bool RankHealth::is_one_host() const { return local_size() == static_cast<int>(processes_.size()); }

int RankHealth::local_rank() const {
  return static_cast<int>(
      std::count_if(processes_.begin(), processes_.begin() + rank_,
                    [&](const auto& process) { return process->network == own().network; }));
}

int RankHealth::local_size() const {
  return static_cast<int>(std::count_if(processes_.begin(), processes_.end(), [&](const auto& process) {
    return process->network == own().network;
  }));
}

int RankHealth::first_local_rank() const {
  const auto is_here = [&](const auto& process) { return process->network == own().network; };
  return static_cast<int>(std::find_if(processes_.begin(), processes_.end(), is_here) - processes_.begin());
}

bool RankHealth::has_ended(int rank) const {
  return processes_.at(static_cast<size_t>(rank))->has_ended(own());
}

void RankHealth::require_all_alive() const { require_alive(processes_, own(), place_); }

// LibTorch would find out as well, but print many lines.
void RankHealth::require_store_host() const {
  require<Error>(!store_host_ || !has_ended(*store_host_), "the process of rank ", store_host_.value_or(0),
                 ", which kept the store, has ended");
}

void RankHealth::tell(const std::vector<std::string>& record) {
  require_store_host();
  store_->append(kStatusKey, pack(record));
}

void RankHealth::leave(const std::string& reason) {
  tell({"left", std::to_string(rank_), reason});
  failed_at_ = Clock::now().time_since_epoch().count();
}

void RankHealth::tell_failure(const std::string& operation, const FailureReport& found) noexcept {
  try {
    std::vector<std::string> record{"failed", std::to_string(rank_), operation, found.text};
    for (const int rank : found.ranks) record.push_back(std::to_string(rank));
    tell(record);
    failed_at_ = Clock::now().time_since_epoch().count();
  } catch (const std::exception&) {  // then the others find out by themselves
  }
}

struct RankHealth::WorldState {
  bool is_searching = false;  // a rank has noticed a failure, and somebody that it asks for is silent
  FailureReport failure;      // the first for which a cause was found
};

// What is known of one rank.
struct RankHealth::RankState {
  int rank = 0;
  bool has_ended = false, is_alive = false, has_left_quietly = false;
  std::optional<std::string> left;
  std::optional<std::string> failed;  // in which operation, and what it found out
  bool failed_with_others = false;    // than those that were asked for
};

// A record that was unpacked.
struct RankHealth::StatusRecord {
  // Throws Error for what is no record of these ranks.
  StatusRecord(const std::string& record, size_t world_size) : texts(unpack(record)) {
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

// Returns the states of these ranks, without this one. `world`, if there is one: what is known of all ranks
// together.
std::vector<RankHealth::RankState> RankHealth::states(const std::vector<int>& ranks, WorldState* world) {
  require_store_host();
  std::vector<RankState> states;
  std::vector<char> searches(processes_.size(), 0);
  std::vector<RankState*> by_rank(processes_.size());
  states.reserve(ranks.size());
  for (const int rank : ranks) {
    if (rank == rank_) continue;
    // In this order: a process may tell and end between the two.
    RankState& state = states.emplace_back();
    state.rank = rank;
    state.has_ended = has_ended(rank);
    by_rank.at(static_cast<size_t>(rank)) = &state;
  }
  const auto is_asked_for = [&](int rank) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  };
  for (const std::string& record : store_->read(kStatusKey)) {
    const StatusRecord status(record, processes_.size());
    const std::vector<std::string>& texts = status.texts;
    const auto rank = static_cast<size_t>(status.rank);
    if (status.is("retired") && store_host_ == status.rank) store_host_has_left_ = true;
    searches[rank] = status.is("alive") && status.rank != rank_ ? 1 : 0;
    if (world != nullptr && !status.suspects.empty() && world->failure.ranks.empty()) {
      world->failure = {{status.rank}, concatenate("rank ", rank, " failed in ", texts[2], ": ", texts[3])};
    }
    RankState* const state = by_rank[rank];
    if (state == nullptr) continue;
    if (status.is("alive") || status.is("failed")) state->is_alive = true;
    if (status.is("retired")) state->has_left_quietly = true;
    if (status.is("left") && !state->left) state->left = texts[2];
    if (status.is("failed") && !state->failed) {
      state->failed = concatenate(texts[2], ": ", texts[3]);
      state->failed_with_others = std::any_of(status.suspects.begin(), status.suspects.end(),
                                              [&](int suspect) { return !is_asked_for(suspect); });
    }
  }
  if (world != nullptr) {
    world->is_searching = std::find(searches.begin(), searches.end(), 1) != searches.end();
  }
  return states;
}

// Who has left, or ended without a word. Who was alive when others had failed is not the cause.
std::optional<RankHealth::FailureReport> RankHealth::find_cause(const std::vector<RankState>& states) {
  FailureReport found;
  for (const RankState& state : states) {
    const bool has_vanished = state.has_ended && !state.is_alive && !state.has_left_quietly;
    if (!state.left && !has_vanished) continue;
    found.ranks.push_back(state.rank);
    found.text += concatenate(found.text.empty() ? "" : "; ", "rank ", state.rank,
                              " left: ", state.left.value_or("its process has ended"));
  }
  if (found.ranks.empty()) return std::nullopt;
  return found;
}

std::optional<RankHealth::FailureReport> RankHealth::find_trouble(const std::vector<int>& ranks) {
  try {
    const std::vector<RankState> known = states(ranks);
    if (auto cause = find_cause(known)) return cause;
    for (const RankState& state : known) {
      if (state.failed) {
        return FailureReport{{state.rank}, concatenate("rank ", state.rank, " failed in ", *state.failed)};
      }
    }
  } catch (const StoreSilent&) {  // a machine that was paused goes on later
  } catch (const std::exception& error) {
    if (!store_host_has_left_) return FailureReport{{0}, concatenate(kStoreGone, " (", error.what(), ")")};
  }
  return std::nullopt;
}

RankHealth::FailureReport RankHealth::find_suspects(const std::vector<int>& ranks) noexcept {
  FailureReport found;
  try {
    tell({"alive", std::to_string(rank_)});
    failed_at_ = Clock::now().time_since_epoch().count();
    const auto end = Clock::now() + kPatience;
    bool has_searched = false;
    for (Pauses pauses;; pauses.pause()) {
      WorldState world;
      const std::vector<RankState> known = states(ranks, &world);
      if (auto cause = find_cause(known)) return *cause;
      std::vector<int> silent, quiet;
      for (const RankState& state : known) {
        if (state.failed_with_others) {
          found.ranks.push_back(state.rank);
          found.text +=
              concatenate(found.text.empty() ? "" : "; ", "rank ", state.rank, " failed in ", *state.failed);
        } else if (state.has_left_quietly) {
          quiet.push_back(state.rank);
        } else if (!state.is_alive) {
          silent.push_back(state.rank);
        }
      }
      if (!found.ranks.empty()) return found;
      if (!silent.empty() && Clock::now() < end) continue;
      if (!silent.empty()) return {silent, "no sign of life from " + names_of(silent)};
      // Nobody is silent here. Somebody may find the cause among ranks that this one does not ask for.
      if (!std::exchange(has_searched, true)) tell({"searched", std::to_string(rank_)});
      if (world.is_searching && Clock::now() < end + kPatience) continue;
      if (!world.failure.ranks.empty()) return world.failure;
      if (!quiet.empty()) {
        const bool is_one = quiet.size() == 1;
        return {quiet, names_of(quiet) +
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

void RankHealth::leave_quietly() noexcept {
  if (failed_at_ != 0) return;
  const auto end = Clock::now() + kPatience;
  try {
    tell({"retired", std::to_string(rank_)});
    if (store_host_ != rank_) return;
    const std::vector<int> all = all_ranks(static_cast<int>(processes_.size()));
    for (Pauses pauses; Clock::now() < end; pauses.pause()) {
      const std::vector<RankState> known = states(all);
      if (std::all_of(known.begin(), known.end(), [](const RankState& state) {
            return state.has_left_quietly || state.has_ended || state.left;
          })) {
        return;
      }
    }
  } catch (const std::exception&) {  // then the others see that the process has ended
  }
}

}  // namespace pacer::detail
