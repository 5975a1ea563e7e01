#include <pacer/collectives/detail/all_ranks_or_none.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

template <class Base>
class HeardByAllError : public Base, public HeardByAll {
 public:
  using Base::Base;
};

}  // namespace

std::vector<std::string> on_all_ranks_or_none(Communicator& world, std::chrono::milliseconds timeout,
                                              const char* action, const std::function<std::string()>& f) {
  if (world.world_size() == 1) return {f()};
  std::string own;
  try {
    own = "+" + f();
  } catch (const InvalidArgument& error) {
    own = concatenate("?", error.what());
  } catch (const std::exception& error) {
    own = concatenate("-", error.what());
  }
  std::vector<std::string> all = world.exchange(own, CollectiveOptions().timeout(timeout));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const char result = all[rank].front();
    all[rank].erase(0, 1);
    require<HeardByAllError<InvalidArgument>>(result != '?', "rank ", rank, " could not ", action, ": ",
                                              all[rank]);
    require<HeardByAllError<FileError>>(result != '-', "rank ", rank, " could not ", action, ": ", all[rank]);
  }
  return all;
}

void leave_after(Communicator& world, const std::exception& error) {
  const bool is_heard = dynamic_cast<const CommunicationError*>(&error) != nullptr ||
                        dynamic_cast<const HeardByAll*>(&error) != nullptr;
  if (world.world_size() > 1 && !is_heard) world.leave(concatenate("its set-up failed: ", error.what()));
}

}  // namespace pacer::detail
