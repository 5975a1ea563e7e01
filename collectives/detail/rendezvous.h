// How the ranks of a run find each other. Ranks of one host meet through a file that only their user can
// reach, those of several hosts at the address where rank 0 (or the launcher) keeps a store.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <pacer/collectives/detail/connect.h>
#include <pacer/collectives/detail/gloo_store.h>
#include <pacer/collectives/detail/rank_health.h>

namespace pacer::detail {

// Who the ranks are, found out through this store; `look` is called now and then meanwhile.
// Throws CommunicationError where not all come, one ends meanwhile or counts another number of ranks, and
// InvalidArgument where this rank is there already.
std::shared_ptr<RankHealth> exchange_members(const std::shared_ptr<Store>& store,
                                             const RendezvousSettings& settings, const std::string& place,
                                             std::chrono::milliseconds timeout, std::optional<int> store_host,
                                             const std::function<void()>& look = {});

struct Rendezvous {
  std::shared_ptr<RankHealth> rank_health;
  std::string place;    // for messages
  std::string address;  // where this rank listens for the others
  Gather gather;        // through the store; once
  // To be called when the ranks are joined: from then on, the store gives up soon where nobody answers.
  std::function<void()> shorten_timeout;
};

// Throws as Communicator::from_environment says.
Rendezvous rendezvous(const RendezvousSettings& settings, const CommunicatorOptions& options);

}  // namespace pacer::detail
