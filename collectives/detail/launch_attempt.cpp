// Records: under "questions" a name of who asks, under "answers/" and that name the name of the attempt.
#include <pacer/collectives/detail/launch_attempt.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include <pacer/collectives/detail/process_identity.h>
#include <pacer/collectives/detail/wait_notice.h>
#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

const std::string kQuestions = "questions";
const std::string kAnswers = "answers/";

// The records of another store whose keys begin with `prefix`.
class PrefixStore : public Store {
 public:
  PrefixStore(std::shared_ptr<Store> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}
  void append(const std::string& key, const std::string& record) override {
    store_->append(prefix_ + key, record);
  }
  std::vector<std::string> read(const std::string& key) override { return store_->read(prefix_ + key); }
  bool wait_for(const std::string& key, Milliseconds limit) override {
    return store_->wait_for(prefix_ + key, limit);
  }

 private:
  const std::shared_ptr<Store> store_;
  const std::string prefix_;
};

// One that nobody else has, on any host.
std::string new_name() {
  std::random_device random;
  std::string name;
  for (int i = 0; i < 4; ++i) name += concatenate(i == 0 ? "" : "-", random());
  return name;
}

std::string ask_for_name(Store& store, int rank, const std::string& place, Milliseconds timeout) {
  const std::string own = new_name();
  store.append(kQuestions, own);
  const auto deadline = Clock::now() + timeout;
  WaitNotice notice(rank, place, timeout, /*speaks=*/rank == 1);
  while (true) {
    const auto left = std::chrono::duration_cast<Milliseconds>(deadline - Clock::now());
    if (store.wait_for(kAnswers + own, std::clamp(left, Milliseconds(0), Milliseconds(1000)))) {
      const std::vector<std::string> answers = store.read(kAnswers + own);
      if (!answers.empty()) return answers.front();
    }
    if (left.count() <= 0) {
      fail_rendezvous(concatenate("rank 0 did not come to ", place, " within ", timeout.count(),
                                  " ms; see what it printed, or set a longer timeout"),
                      {0});
    }
    notice.look("rank 0", "see what it printed");
  }
}

}  // namespace

LaunchAttempt enter_attempt(const std::shared_ptr<Store>& store, int rank, const std::string& place,
                            Milliseconds timeout) {
  const std::string name = rank == 0 ? new_name() : ask_for_name(*store, rank, place, timeout);
  LaunchAttempt attempt{std::make_shared<PrefixStore>(store, name + "/"), [] {}};
  if (rank == 0) {
    attempt.answer = [store, name, answered = size_t{0}]() mutable {
      const std::vector<std::string> questions = store->read(kQuestions);
      for (; answered < questions.size(); ++answered) store->append(kAnswers + questions[answered], name);
    };
  }
  return attempt;
}

}  // namespace pacer::detail
