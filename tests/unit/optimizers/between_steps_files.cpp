// What loading a state between two steps must come to. Each case corrupted weights or state without a word
// before its fix.
#include "support/catch.h"

#include <sstream>

#include <pacer/optimizers/fused_lamb.h>

#include "support/checkpoints/archives.h"
#include "support/optimizers/between_steps.h"
#include "support/optimizers/contract.h"

namespace pacer::testing::between_steps {

TEMPLATE_TEST_CASE("16-bit parameters of a frozen optimizer resume in whatever memory order they have",
                   "[lifecycle]", OneBitAdam, OneBitLamb) {
  torch::manual_seed(1);
  for (const auto master : {MasterWeights::remainder, MasterWeights::remainder_8, MasterWeights::fp32}) {
    const auto make = [] {
      torch::manual_seed(2);
      return leaves({torch::randn({4, 3, 5, 2}, at::kDouble)
                         .to(at::kBFloat16)
                         .contiguous(at::MemoryFormat::ChannelsLast),
                     torch::randn({9, 7}, at::kDouble).to(at::kBFloat16).t(),
                     torch::randn({11}).to(at::kBFloat16)});
    };
    const auto options = alone<TestType>().master_weights(master);
    auto unbroken = make(), resumed = make();
    TestType straight(unbroken, options);
    auto stopped = std::make_unique<TestType>(resumed, options);
    for (uint64_t t = 0; t < 8; ++t) {
      if (t == 5) {
        NamedTensors state = cloned_state(stopped->export_state()),
                     errors = cloned_state(stopped->export_rank_state());
        for (auto* file : {&state, &errors}) {
          for (auto& item : *file) item.second = item.second.contiguous();  // as files hold tensors
        }
        stopped = std::make_unique<TestType>(resumed, options);
        stopped->import_states(state, errors);
      }
      set_gradients(unbroken, 0, t);
      set_gradients(resumed, 0, t);
      straight.step();
      stopped->step();
    }
    CHECK(same_bits(unbroken, resumed));
  }
}

TEMPLATE_TEST_CASE("errors of another memory order are refused", "[lifecycle]", OneBitAdam, OneBitLamb) {
  const Tensor values = torch::arange(9, at::kFloat).view({3, 3});
  const auto rows = leaves({values.clone()}), columns = leaves({values.t().contiguous().t()});
  for (const bool is_old_file : {false, true}) {
    TestType saved(columns, alone<TestType>()), other(rows, alone<TestType>());
    for (uint64_t t = 0; t < 4; ++t) set_gradients(columns, 0, t), saved.step();
    const NamedTensors state = cloned_state(saved.export_state());
    NamedTensors errors = cloned_state(saved.export_rank_state());
    CHECK(errors.count("0.0/strides") == 1);
    if (is_old_file) errors.erase("onebit/state_version"), errors.erase("0.0/strides");
    const std::string message = refusal([&] { other.import_states(state, errors); });
    CHECK((is_old_file ? message == "<no exception>" : contains(message, "memory order")));
    for (const auto& strides : std::vector<std::vector<int64_t>>{{2, 2}, {4, 0}, {1, 2}, {3, 3}, {-1, 5}}) {
      CAPTURE(strides);  // the first two end where the last element is, but elements share memory
      errors["0.0/strides"] = torch::tensor(strides, at::kLong);
      CHECK(contains(refusal([&] { (void)contract(other).join_rank_states(state, {errors}); }),
                     "are no strides of a parameter of shape"));
    }
  }
}

TEST_CASE("errors of a node of one rank are joined as those of a rank that has no node", "[lifecycle]") {
  const auto parameters = leaves({torch::arange(12, at::kFloat).view({4, 3})});
  OneBitAdam optimizer(parameters, alone<OneBitAdam>());
  for (uint64_t t = 0; t < 4; ++t) set_gradients(parameters, 0, t), optimizer.step();
  const NamedTensors state = cloned_state(optimizer.export_state());
  const NamedTensors errors = cloned_state(optimizer.export_rank_state());
  NamedTensors of_node = errors;
  of_node["0.0/worker_error"] = errors.at("0.0/worker_error").view({-1});
  of_node["onebit/first_of_parts"] = torch::zeros({1}, at::kLong);
  CHECK(differing_name(contract(optimizer).join_rank_states(state, {errors}),
                       contract(optimizer).join_rank_states(state, {of_node})) == "");
}

TEST_CASE("a file from before PyTorch 1.5 is refused with the way to load it", "[lifecycle]") {
  torch::serialize::OutputArchive out;
  out.write("step_buffers/size", torch::tensor(int64_t{0}));
  out.write("exp_average_buffers/size", torch::tensor(int64_t{0}));
  std::stringstream file;
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  FusedAdam optimizer(leaves({torch::ones({3})}));
  const std::string message = refusal([&] { optimizer.load(in); });
  CHECK(contains(message, "before 1.5"));
  CHECK(contains(message, "take_over"));
}

TEMPLATE_TEST_CASE("a load brings the freeze rule that its options speak of", "[lifecycle]", OneBitAdam,
                   OneBitLamb) {
  const auto options = [](int64_t planned) {
    return OptionsOf<TestType>(0.01).betas({0.5, 0.5}).freeze_automatically(planned);
  };
  const auto parameters = leaves({torch::ones({30})});
  TestType saved(parameters, options(20)), loaded(parameters, options(2000));
  for (uint64_t t = 0; t < 2; ++t) set_gradients(parameters, 0, t), saved.step();
  loaded.import_state(cloned_state(saved.export_state()));
  for (uint64_t t = 2; t < 12 && !loaded.frozen_at(); ++t) set_gradients(parameters, 0, t), loaded.step();
  CHECK(loaded.frozen_at().value_or(99) <= 6);  // 30 % of 20
}

TEST_CASE("a look ahead at gradients and a trust ratio know nothing of states from before a load",
          "[lifecycle]") {
  const auto parameters = leaves({torch::ones({30}), torch::ones({4})});
  FusedLamb optimizer(parameters, FusedLambOptions(0.01).finite_check(true));
  for (uint64_t t = 0; t < 2; ++t) set_gradients(parameters, 0, t), optimizer.step();
  CHECK(optimizer.trust_ratio(parameters[0]) != 1);
  CHECK(contract(optimizer).look_early(parameters));
  optimizer.import_state(cloned_state(optimizer.export_state()));
  CHECK_FALSE(contract(optimizer).look_early(parameters));
  CHECK(optimizer.trust_ratio(parameters[0]) == 1);
}

}  // namespace pacer::testing::between_steps
