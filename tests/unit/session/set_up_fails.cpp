// A rank that fails while it is set up: the others hear the reason at once, wherever they wait by then, and
// though its Session still exists.
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using torch::Tensor;
using Clock = std::chrono::steady_clock;

// Throws where it is told to.
class Failing : public Hook {
 public:
  explicit Failing(std::string where) : where_(std::move(where)) {}
  std::string hook_name() const override { return "failing"; }
  Slot slot() const override { return Slot::record; }
  void attach(SessionParts& /*parts*/) override { fail_in("attach"); }
  void arrange() override { fail_in("arrange"); }
  void start(const Progress& /*progress*/) override { fail_in("start"); }

 private:
  void fail_in(const std::string& where) const {
    if (where == where_) throw InvalidArgument("made up in " + where);
  }
  const std::string where_;
};

struct Rank {
  Rank(const std::shared_ptr<Communicator>& world, const std::string& fails)
      : optimizer(model->parameters(), FusedAdamWOptions(0.01)) {
    if (fails == "constructor") {  // a parameter outside of the model has the name of one of its own
      NamedParameters stranger;
      stranger.insert("0.weight", torch::zeros({2}, torch::requires_grad()));
      optimizer.add_param_group(NamedParamGroup(stranger));
    }
    session = std::make_unique<Session>(*model, optimizer, world);
    session->use(Failing(fails));
  }
  void step() {
    auto [x] = session->begin(torch::ones({2, 4}));
    session->backward(model->forward(x).square().mean());
    session->step();
  }
  torch::nn::Sequential model{torch::nn::Linear(4, 3)};
  FusedAdamW optimizer;
  std::unique_ptr<Session> session;
};

// What the ranks hear where rank 1 fails there. Their Sessions exist to the end.
std::vector<std::string> heard(const std::string& fails, const std::function<void(Rank&, int)>& then) {
  constexpr std::chrono::minutes kTimeout{5};
  const auto worlds = Communicator::in_process(3, CommunicatorOptions().timeout(kTimeout));
  std::vector<std::unique_ptr<Rank>> ranks(3);
  const auto start = Clock::now();
  auto messages = run_ranks(3, [&](int r) {
    const auto at = static_cast<size_t>(r);
    ranks[at] = std::make_unique<Rank>(worlds[at], r == 1 ? fails : "");
    then(*ranks[at], r);
    ranks[at]->step();
  });
  CHECK(Clock::now() - start < kTimeout / 2);
  return messages;
}

void check_told(const std::vector<std::string>& messages, const std::string& reason) {
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    INFO(messages[rank]);
    CHECK(messages[rank].find("rank 1 left: its set-up failed: " + reason) != std::string::npos);
  }
  INFO(messages[1]);
  CHECK(messages[1].find(reason) == 0);
}

}  // namespace

TEST_CASE("ranks hear at once why another one could not be set up", "[session][ranks][mistakes]") {
  for (const char* where : {"attach", "arrange", "start"}) {
    check_told(heard(where, [](Rank&, int) {}), std::string("made up in ") + where);
  }
  check_told(heard("constructor", [](Rank&, int) {}), "two parameters");
}

TEST_CASE("ranks that prewarm or resume hear at once why another one cannot", "[session][ranks][mistakes]") {
  const auto prewarm = [](Rank& rank, int number) {
    rank.session->prewarm([&] {
      if (number == 1) throw InvalidArgument("made up in prewarm");
      return rank.model->forward(torch::ones({2, 4})).square().mean();
    });
  };
  check_told(heard("", prewarm), "made up in prewarm");
  const TemporaryFolder folder;
  for (const char* where : {"arrange", "start"}) {
    check_told(heard(where,
                     [&](Rank& rank, int) {
                       rank.session->use(Checkpoints(CheckpointsOptions(folder.path("run"))));
                       rank.session->resume();
                     }),
               std::string("made up in ") + where);
  }
}

TEST_CASE("what all ranks have refused together leaves their Communicator as it is", "[session][ranks]") {
  const TemporaryFolder folder;
  for (const bool again : {false, true}) {
    const auto worlds = Communicator::in_process(2, CommunicatorOptions().timeout(std::chrono::seconds(20)));
    REQUIRE(first_of(run_ranks(2, [&](int r) {
              Rank rank(worlds[static_cast<size_t>(r)], "");
              rank.session->use(Checkpoints(CheckpointsOptions(folder.path("run")).every(1)));
              if (again) {
                bool refused = false;
                try {
                  rank.step();
                } catch (const InvalidArgument&) {
                  refused = true;
                }
                RANK_REQUIRE(refused);
                RANK_REQUIRE(!worlds[static_cast<size_t>(r)]->has_failed());
                return;
              }
              rank.step();
              rank.session->finish();
            })) == "");
  }
}

}  // namespace pacer::testing
