// What paged() refuses, and that it is no part of a saved state.
#include "support/catch.h"

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/session/session.h>

#include "support/checkpoints/archives.h"
#include "support/kernels/lamb.h"
#include "support/optimizers/contract.h"
#include "support/optimizers/late_page_device.h"
#include "support/session/small_model.h"

namespace pacer::testing {

TEMPLATE_TEST_CASE("parameters on the CPU are refused before anything is changed", "[paging]", FusedAdam,
                   FusedAdamW, FusedLamb) {
  const auto parameters = random_parameters({{3, 4}}, at::kFloat);
  TestType optimizer(parameters, OptionsOf<TestType>(0.1).paged(Paging()));
  set_random_gradients(parameters);
  CHECK(unless_refused(optimizer, {"have their state in host memory anyway; leave out paged()"},
                       [&] { optimizer.step(); }) == "");
}

TEMPLATE_TEST_CASE("sizes that cannot be are refused by name", "[paging]", FusedAdamW, FusedLamb) {
  const auto parameters = random_parameters({{3}}, at::kFloat);
  const auto make = [&](const Paging& paging) {
    return refusal([&] { TestType(parameters, OptionsOf<TestType>(0.1).paged(paging)); });
  };
  CHECK(contains(make(Paging().resident_bytes(-1)), "resident_bytes must be >= 0, not -1"));
  CHECK(contains(make(Paging().page_bytes(4095)), "page_bytes must be >= 4096, not 4095"));
  CHECK(contains(make(Paging().headroom(-2)), "headroom must be >= 0 bytes, not -2"));
  CHECK(make(Paging()) == "<no exception>");
}

TEST_CASE("state that is paged needs a momentum in every group of FusedSgd", "[paging]") {
  const auto parameters = random_parameters({{3}, {4}}, at::kFloat);
  set_random_gradients(parameters);
  const auto options = FusedSgdOptions(0.1).momentum(0.9);
  PagedOnHost<FusedSgd> paged(parameters, options, Paging());
  paged.step();
  paged.sync_state();
  options_of(paged.base()).momentum(0);
  CHECK(unless_refused(paged.base(), {"group 0 has no momentum", "set a momentum in every group"},
                       [&] { paged.step(); }) == "");
}

TEST_CASE("paged() is about the whole optimizer", "[paging]") {
  const auto parameters = random_parameters({{3}}, at::kFloat);
  set_random_gradients(parameters);
  torch::optim::OptimizerParamGroup group(parameters);
  group.set_options(std::make_unique<FusedAdamWOptions>(FusedAdamWOptions(0.1).paged(Paging())));
  FusedAdamW optimizer(std::vector<torch::optim::OptimizerParamGroup>{group}, FusedAdamWOptions(0.1));
  CHECK(unless_refused(optimizer, {"group 0", "set it there"}, [&] { optimizer.step(); }) == "");
  PagedOnHost<FusedAdamW> paged(parameters, FusedAdamWOptions(0.1), Paging());
  options_of(paged.base()).paged(Paging());
  paged.step();
  options_of(paged.base()).paged(Paging().resident_bytes(3));
  CHECK(contains(refusal([&] { paged.step(); }), "another paged()"));
}

TEST_CASE("a step that is to be replayed from a CUDA graph is refused", "[paging]") {
  const auto parameters = random_parameters({{3}}, at::kFloat);
  set_random_gradients(parameters);
  PagedOnHost<FusedAdamW> optimizer(parameters, FusedAdamWOptions(0.1), Paging());
  StepInputs inputs;
  inputs.replayable = true;
  CHECK(contains(refusal([&] { contract(optimizer).prepare(inputs); }),
                 "leave out the CudaGraph hook, or paged()"));
  optimizer.step();
}

TEST_CASE("ranks share the work of paged Adam, and not of paged LAMB", "[paging]") {
  const auto parameters = random_parameters({{3}}, at::kFloat);
  FusedAdamW adam(parameters, FusedAdamWOptions(0.1).paged(Paging()));
  CHECK(contract(adam).unshared_reason(GradientScope::world).empty());
  FusedLamb lamb(parameters, FusedLambOptions(0.1).paged(Paging()));
  CHECK(contains(contract(lamb).unshared_reason(GradientScope::world), "paged"));
  CHECK(contract(FusedLamb(parameters)).unshared_reason(GradientScope::world).empty());
}

TEST_CASE("paging is not saved, and a load leaves it as it is", "[paging]") {
  const auto parameters = random_parameters({{3}}, at::kFloat);
  FusedAdamW paged(parameters, FusedAdamWOptions(0.1).paged(Paging())), plain(parameters);
  for (const auto& entry : entries_of(saved(paged))) CHECK_FALSE(contains(entry.path, "paged"));
  for (const auto& item : paged.export_state()) CHECK_FALSE(contains(item.first, "paged"));
  load_from(plain, saved(paged));
  CHECK_FALSE(options_of(plain).paged());
  load_from(paged, saved(plain));
  CHECK(options_of(paged).paged() == Paging());
  paged.import_state(plain.export_state());
  set_random_gradients(parameters);
  CHECK(contains(refusal([&] { paged.step(); }), "leave out paged()"));  // it is still paged
  CHECK(contract(paged).keeps_state_on_host());
  CHECK_FALSE(contract(plain).keeps_state_on_host());
  CHECK(FusedAdamWOptions().paged(Paging()) == FusedAdamWOptions());
}

TEST_CASE("a Session starts the copies with the last backward of a step", "[paging][session]") {
  const int64_t kMicroSteps = 2;
  auto model = small_model(), twin = small_model();
  PagedOnHost<FusedAdamW> optimizer(model->parameters(), FusedAdamWOptions(0.01), Paging().page_bytes(4096));
  FusedAdamW plain(twin->parameters(), FusedAdamWOptions(0.01));
  Session session(*model, optimizer), peer(*twin, plain);
  for (Session* one : {&session, &peer}) {
    one->use(GradientAccumulation(kMicroSteps)).use(GradientClipping(0.05));
  }
  const auto pass = [](Session& one, SmallModel& of, int64_t i) {
    const auto batch = small_batch(i);
    auto [x, y] = one.begin(batch.first, batch.second);
    one.backward(of->loss(x, y));
  };
  for (int64_t i = 0; i < 10; ++i) {
    const int64_t before = optimizer.device ? optimizer.device->copies : 0;
    pass(session, model, i);
    pass(peer, twin, i);
    if (optimizer.device && i % kMicroSteps == 0) CHECK(optimizer.device->copies == before);
    if (optimizer.device && i % kMicroSteps == 1) CHECK(optimizer.device->copies == before + 3 * 2);
    session.step();
    peer.step();
  }
  optimizer.sync_state();
  CHECK(difference(snapshot(plain), snapshot(optimizer.base())) == "");
}

}  // namespace pacer::testing
