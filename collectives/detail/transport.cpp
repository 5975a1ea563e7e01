#include <pacer/collectives/detail/transport.h>

#include <algorithm>
#include <utility>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

class JoinedWorks : public TransportWork {
 public:
  explicit JoinedWorks(std::vector<TransportWorkPtr> works) : works_(std::move(works)) {}
  void wait() override {
    for (const TransportWorkPtr& work : works_) work->wait();
  }
  bool is_done() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->is_done(); });
  }

 private:
  std::vector<TransportWorkPtr> works_;
};

}  // namespace

TransportWorkPtr joined(std::vector<TransportWorkPtr> works) {
  return std::make_unique<JoinedWorks>(std::move(works));
}

TransportWorkPtr Transport::all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                                                 Milliseconds timeout) {
  std::vector<TransportWorkPtr> works;
  for (const at::Tensor& tensor : tensors) works.push_back(all_reduce(tensor, timeout));
  return joined(std::move(works));
}

TransportWorkPtr Transport::run_on_stream(const std::function<void()>& /*f*/) {
  throw Error("the transport " + name() + " has no stream");
}

}  // namespace pacer::detail
