// A process that is killed while it trains with paged state, and a run that goes on from what it saved: the
// same bits as a run that nobody interrupted.
#include "support/catch.h"

#include <csignal>
#include <cstdlib>
#include <string>

#include <torch/cuda.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/files/checkpoint_folder.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/session/session.h>

#include "support/both_devices.h"
#include "support/checkpoints/archives.h"
#include "support/session/small_model.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

constexpr const char* kFolder = "PACER_TEST_KILLED_FOLDER";
constexpr int64_t kSteps = 20, kKilledAfter = 13;

// Steps up to `end`, from the newest checkpoint in the folder if there is one; where it should die, in the
// middle of a step. The weights.
std::vector<Tensor> train(const std::string& folder, int64_t end, bool dies) {
  torch::manual_seed(98);
  auto model = small_model();
  model->to(at::kCUDA);
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01).paged(Paging().page_bytes(4096)));
  Session session(*model, optimizer);
  session.use(GradientClipping(0.05)).use(Checkpoints(CheckpointsOptions(folder).every(5).synchronous(true)));
  session.resume();
  while (session.progress().step < end) {
    const auto batch = small_batch(session.progress().step);
    auto [x, y] = session.begin(batch.first.to(at::kCUDA), batch.second.to(at::kCUDA));
    session.backward(model->loss(x, y));
    if (dies && session.progress().step == kKilledAfter) std::raise(SIGKILL);
    session.step();
  }
  session.finish();
  std::vector<Tensor> weights;
  for (const Tensor& parameter : model->parameters()) weights.push_back(parameter.detach().cpu().clone());
  return weights;
}

}  // namespace

TEST_CASE("trains with paged state until it is killed", "[.][killed]") {
  const char* folder = std::getenv(kFolder);
  REQUIRE(folder != nullptr);
  train(folder, kSteps, /*dies=*/true);
}

TEST_CASE("a killed run with paged state goes on to the bit", "[gpu][paging]") {
  PACER_NEEDS_GPU();
  const TemporaryFolder folder;
  ::setenv(kFolder, folder.path("killed").c_str(), 1);
  const int status =
      std::system("/proc/$PPID/exe 'trains with paged state until it is killed' > /dev/null 2>&1");
  REQUIRE(status != 0);
  REQUIRE(list_checkpoints(folder.path("killed")).front().step == 10);
  const auto whole = train(folder.path("whole"), kSteps, /*dies=*/false);
  const auto resumed = train(folder.path("killed"), kSteps, /*dies=*/false);
  REQUIRE(whole.size() == resumed.size());
  for (size_t i = 0; i < whole.size(); ++i) REQUIRE(whole[i].equal(resumed[i]));
}

}  // namespace pacer::testing
