#include <pacer/collectives/agreement.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>

#include <pacer/collectives/detail/agreement_message.h>
#include <pacer/core/error.h>
#include <pacer/files/checksum.h>

namespace pacer {
namespace {

constexpr size_t kLongestFact = 300;  // characters of one that are shown

std::string clipped(const std::string& text) {
  return text.size() <= kLongestFact ? text : text.substr(0, kLongestFact) + " ...";
}

std::string joined(const std::vector<Fact>& facts) {
  std::string text;
  for (const Fact& fact : facts) text += fact.what + '\0' + fact.value + '\0';
  return text;
}

// The first rank whose status differs from rank 0's in what must be equal; 0 if none does.
int first_difference(const std::vector<RankStatus>& all) {
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const RankStatus &a = all[0], &b = all[rank];
    if (a.kind != b.kind || a.intent != b.intent || a.step != b.step || a.micro_steps != b.micro_steps) {
      return static_cast<int>(rank);
    }
  }
  return 0;
}

[[noreturn]] void disagree(const Communicator& world, const std::string& what, int64_t step, int rank) {
  throw CommunicationError(detail::concatenate("the ranks disagree: ", what, " (seen by rank ",
                                               world.rank_in_world(world.rank()), ")"),
                           "agreement", 0, step, {world.rank_in_world(rank)});
}

}  // namespace

StatusExchange::StatusExchange(Communicator& world, const RankStatus& own) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(RankStatus));
  own_ = at::empty({kBytes}, at::kByte);
  std::memcpy(own_.mutable_data_ptr(), &own, sizeof(own));
  all_ = at::empty({kBytes * world.world_size()}, at::kByte);
  rank_ = world.rank();
  work_ = world.all_gather_host(all_, own_);
}

std::vector<RankStatus> StatusExchange::wait() {
  work_.wait();
  std::vector<RankStatus> all(static_cast<size_t>(all_.numel()) / sizeof(RankStatus));
  std::memcpy(all.data(), all_.const_data_ptr(), static_cast<size_t>(all_.numel()));
  all_ = at::Tensor();
  if (const int rank = first_difference(all)) {
    const RankStatus& other = all[static_cast<size_t>(rank)];
    const bool is_stray = detail::is_call(&all[0]) || detail::is_call(&other);
    throw CommunicationError(
        detail::concatenate("the ranks are out of step: rank 0 ", detail::describe_agreement(&all[0]),
                            ", rank ", rank, " ", detail::describe_agreement(&other),
                            is_stray ? "; call a collective on every rank, or on none"
                                     : "; give every rank the same number of batches and the same hooks"),
        "agreement", 0, all[static_cast<size_t>(rank_)].step, {rank});
  }
  return all;
}

namespace {

// `sum`: a checksum of what ranks compare. `make_facts` says what that is.
void require_same(Communicator& world, int64_t step, const std::string& sum,
                  const std::function<std::vector<Fact>()>& make_facts) {
  RankStatus own;
  own.intent = Intent::agree;
  own.step = step;
  sum.copy(own.fingerprint, sizeof(own.fingerprint));
  const std::vector<RankStatus> all = StatusExchange(world, own).wait();
  const auto same = [&](const RankStatus& status) {
    return std::memcmp(status.fingerprint, all[0].fingerprint, sizeof(status.fingerprint)) == 0;
  };
  if (std::all_of(all.begin(), all.end(), same)) return;

  // Something differs, and every rank knows that; now they find out what.
  const std::vector<Fact> facts = make_facts();
  std::string sums;
  for (const Fact& fact : facts) sums += checksum_of(joined({fact}));
  const std::vector<std::string> all_sums = world.exchange(sums);
  size_t place = std::string::npos;
  int rank = 0;
  for (size_t r = 1; r < all_sums.size(); ++r) {
    const std::string &a = all_sums[0], &b = all_sums[r];
    const size_t common = std::min(a.size(), b.size());
    const auto first = static_cast<size_t>(
        std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(common), b.begin()).first -
        a.begin());
    if (first == common && a.size() == b.size()) continue;
    const size_t fact = first / sizeof(own.fingerprint);
    if (fact < place) {
      place = fact;
      rank = static_cast<int>(r);
    }
  }
  if (place == std::string::npos) {
    disagree(world,
             "what they compared is alike, but arrived otherwise than it was sent; look at the network and "
             "the memory of their hosts",
             step, static_cast<int>(std::find_if_not(all.begin(), all.end(), same) - all.begin()));
  }
  const std::string own_fact = place < facts.size()
                                   ? detail::concatenate(facts[place].what, ": ", facts[place].value)
                                   : "nothing more";
  const std::vector<std::string> texts = world.exchange(clipped(own_fact));
  disagree(world,
           detail::concatenate("rank ", world.rank_in_world(0), " has \"", texts[0], "\", but rank ",
                               world.rank_in_world(rank), " has \"", texts[static_cast<size_t>(rank)],
                               "\"; build the same model, optimizer and hooks on every rank"),
           step, rank);
}

}  // namespace

void require_agreement(Communicator& world, int64_t step, const std::vector<Fact>& facts) {
  if (world.world_size() == 1) return;
  require_same(world, step, checksum_of(joined(facts)), [&] { return facts; });
}

void require_agreement(Communicator& world, int64_t step, const std::vector<int64_t>& numbers,
                       const std::function<std::vector<Fact>()>& facts) {
  if (world.world_size() == 1) return;
  const auto* bytes = reinterpret_cast<const char*>(numbers.data());
  require_same(world, step, checksum_of({bytes, numbers.size() * sizeof(int64_t)}), facts);
}

}  // namespace pacer
