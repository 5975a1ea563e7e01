// How the ranks of a run find each other: through a file of this host, or at the address where rank 0 (or the
// launcher) listens.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <pacer/collectives/detail/connect.h>
#include <pacer/collectives/detail/roll_call.h>

namespace pacer::detail {

struct Rendezvous {
  std::shared_ptr<NoticeBoard> board;
  std::shared_ptr<const RollCall> roll;  // all ranks are here
  std::string place;                     // for messages
  std::string address;                   // where this rank listens for the others
  // To be called when the ranks are joined: from then on, the board gives up soon where nobody answers.
  std::function<void()> settle;
};

// Throws as Communicator::from_environment says.
Rendezvous meet(const Meeting& meeting, const CommunicatorOptions& options);

}  // namespace pacer::detail
