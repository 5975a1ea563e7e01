// A state belongs to the optimizer that saved it and to the parameters of its names: no other optimizer goes
// on from it, and no other parameter gets it.
#include <sstream>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/fused_rmsprop.h>
#include <pacer/optimizers/fused_sgd.h>
#include <pacer/optimizers/muon.h>
#include <pacer/optimizers/onebit_adam.h>
#include <pacer/optimizers/onebit_lamb.h>
#include <pacer/optimizers/onebit_muon.h>
#include <pacer/optimizers/schedule_free.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/checkpoints/archives.h"
#include "support/optimizers/optimizers.h"
#include "support/session/mistakes_trainer.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using Made = std::unique_ptr<torch::optim::Optimizer>;
using Make = std::function<Made(const NamedParameters&)>;

// Weight decay, so that rules differ.
std::vector<std::pair<std::string, Make>> own_optimizers() {
  return {
      {"FusedAdam",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<FusedAdam>(p, FusedAdamOptions(0.1).weight_decay(0.3));
       }},
      {"FusedAdamW",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<FusedAdamW>(p, FusedAdamWOptions(0.1).weight_decay(0.3));
       }},
      {"FusedSgd",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<FusedSgd>(p, FusedSgdOptions(0.1).momentum(0.9));
       }},
      {"FusedRmsprop", [](const NamedParameters& p) -> Made { return std::make_unique<FusedRmsprop>(p); }},
      {"FusedLamb", [](const NamedParameters& p) -> Made { return std::make_unique<FusedLamb>(p); }},
      {"Muon",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<Muon>(p, MuonOptions(0.1).orthogonalize(false));
       }},
      {"OneBitAdam",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<OneBitAdam>(p, OneBitAdamOptions().freeze_step(1));  // saved frozen
       }},
      {"OneBitLamb",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<OneBitLamb>(p, OneBitLambOptions().freeze_step(100));
       }},
      {"OneBitMuon",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<OneBitMuon>(p, OneBitMuonOptions(0.1).orthogonalize(false));
       }},
      {"ScheduleFreeAdamW",
       [](const NamedParameters& p) -> Made { return std::make_unique<ScheduleFreeAdamW>(p); }},
  };
}
std::vector<std::pair<std::string, Make>> torch_optimizers() {
  return {
      {"torch::optim::Adam",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<torch::optim::Adam>(p.values(), torch::optim::AdamOptions(0.1));
       }},
      {"torch::optim::AdamW",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<torch::optim::AdamW>(p.values(), torch::optim::AdamWOptions(0.1));
       }},
      {"torch::optim::SGD",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<torch::optim::SGD>(p.values(), torch::optim::SGDOptions(0.1).momentum(0.9));
       }},
      {"torch::optim::RMSprop",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<torch::optim::RMSprop>(p.values(), torch::optim::RMSpropOptions(0.1));
       }},
  };
}

// Two steps of a Session with Checkpoints, after those that are there.
void train(const Make& make, const std::string& folder, torch::nn::Linear* trained = nullptr) {
  torch::manual_seed(3);
  torch::nn::Linear model(3, 2);
  const Made optimizer = make(model->named_parameters());
  Session session(model, *optimizer);
  session.use(Checkpoints(CheckpointsOptions(folder)));
  session.resume();
  for (int step = 0; step < 2; ++step) {
    auto [x] = session.begin(torch::ones({4, 3}));
    session.backward(model->forward(x).square().mean());
    session.step();
  }
  session.finish();
  if (trained != nullptr) *trained = model;
}

}  // namespace

TEST_CASE("a checkpoint of one optimizer is refused by every other, and both are named", "[resume]") {
  auto all = own_optimizers();
  for (const auto& torchs : torch_optimizers()) all.push_back(torchs);
  for (const auto& [saver, make_saver] : all) {
    const TemporaryFolder folder;
    const CapturedStderr quiet;
    train(make_saver, folder.path("c"));
    for (const auto& [loader, make_loader] : all) {
      if (loader == saver || saver == "torch::optim::" + loader.substr(std::min<size_t>(5, loader.size())))
        continue;
      if (saver == "torch::optim::SGD" && loader == "FusedSgd") continue;
      if (saver == "torch::optim::RMSprop" && loader == "FusedRmsprop") continue;
      CAPTURE(saver, loader);
      const Make& make = make_loader;
      const std::string message = refusal([&] { train(make, folder.path("c")); });
      INFO(message);
      CHECK(contains(message, "was saved by " + saver + ", but this is " + loader));
    }
  }
}

TEST_CASE("state by name and archives are refused by every other optimizer", "[resume]") {
  const auto all = own_optimizers();
  for (const auto& [saver, make_saver] : all) {
    torch::nn::Linear model(3, 2);
    const Made source = make_saver(model->named_parameters());
    for (const Tensor& p : model->parameters()) p.mutable_grad() = torch::ones_like(p);
    source->step();
    auto& own = dynamic_cast<SessionOptimizer&>(*source);
    for (const auto& [loader, make_loader] : all) {
      if (loader == saver) continue;
      CAPTURE(saver, loader);
      const Made target = make_loader(model->named_parameters());
      auto& other = dynamic_cast<SessionOptimizer&>(*target);
      const std::string named = refusal([&] { other.import_state(own.export_state()); });
      CHECK(contains(named, "was saved by " + saver + ", but this is " + loader));
      if (contains(saver + loader, "OneBit")) continue;  // has no archive
      const std::string archived = refusal([&] { load_from(*target, saved(*source)); });
      CHECK(contains(archived, "was saved by " + saver + ", but this is " + loader));
    }
  }
}

TEST_CASE("a Session that ran with torch's Adam, AdamW, SGD or RMSprop goes on with the fused one",
          "[resume]") {
  const auto compare = [](const Make& torchs, const Make& fused) {
    const TemporaryFolder folder, wanted;
    const CapturedStderr quiet;
    torch::nn::Linear found(nullptr), expected(nullptr);
    train(torchs, folder.path("c"));
    train(fused, folder.path("c"), &found);
    train(torchs, wanted.path("c"));
    train(torchs, wanted.path("c"), &expected);
    CHECK((found->weight - expected->weight).abs().max().item<double>() <= 1e-6);
    CHECK((found->bias - expected->bias).abs().max().item<double>() <= 1e-6);
    train(fused, folder.path("c"));  // and from its own
  };
  for (const bool nesterov : {false, true}) {
    CAPTURE(nesterov);
    compare(
        [=](const NamedParameters& p) -> Made {
          const double dampening = nesterov ? 0 : 0.3;
          const auto options =
              torch::optim::SGDOptions(0.1).momentum(0.9).dampening(dampening).weight_decay(0.3).nesterov(
                  nesterov);
          return std::make_unique<torch::optim::SGD>(p.values(), options);
        },
        [](const NamedParameters& p) -> Made { return std::make_unique<FusedSgd>(p); });
  }
  for (const bool centered : {false, true}) {
    CAPTURE(centered);
    compare(
        [=](const NamedParameters& p) -> Made {
          auto options = torch::optim::RMSpropOptions(0.01).alpha(0.9).weight_decay(0.3).momentum(0.5);
          return std::make_unique<torch::optim::RMSprop>(p.values(), options.centered(centered));
        },
        [](const NamedParameters& p) -> Made { return std::make_unique<FusedRmsprop>(p); });
  }
  for (const bool amsgrad : {false, true}) {
    CAPTURE(amsgrad);
    compare(
        [=](const NamedParameters& p) -> Made {
          return std::make_unique<torch::optim::AdamW>(
              p.values(), torch::optim::AdamWOptions(0.1).weight_decay(0.3).amsgrad(amsgrad));
        },
        // Options are those of the checkpoint.
        [](const NamedParameters& p) -> Made { return std::make_unique<FusedAdamW>(p); });
    compare(
        [=](const NamedParameters& p) -> Made {
          return std::make_unique<torch::optim::Adam>(
              p.values(), torch::optim::AdamOptions(0.1).weight_decay(0.3).amsgrad(amsgrad));
        },
        [](const NamedParameters& p) -> Made { return std::make_unique<FusedAdam>(p); });
  }
}

TEST_CASE("the state of an optimizer before it said which it was loads as ever", "[resume]") {
  torch::nn::Linear model(3, 2);
  FusedAdam source(model->named_parameters()), target(model->named_parameters());
  for (const Tensor& p : model->parameters()) p.mutable_grad() = torch::ones_like(p);
  source.step();
  NamedTensors state = source.export_state();
  state.erase("optimizer");
  state["state_version"] = number_tensor(int64_t{3});
  target.import_state(state);
  CHECK(state_of(target, model->weight).step() == 1);
  state["state_version"] = number_tensor(int64_t{4});
  CHECK(contains(refusal([&] { target.import_state(state); }), "no \"optimizer\""));
  for (const Tensor& no_text : {torch::zeros({2, 2}, at::kByte), torch::zeros({3}, at::kInt)}) {
    state["optimizer"] = no_text;
    CHECK(contains(refusal([&] { target.import_state(state); }), "is no text"));
  }
}

TEST_CASE("an archive of the first version resets an option that it leaves out", "[resume]") {
  const auto read_back = [](torch::serialize::OutputArchive& written) {
    std::stringstream file;
    written.save_to(file);
    torch::serialize::InputArchive archive;
    archive.load_from(file);
    return archive;
  };
  torch::serialize::OutputArchive now, first;
  FusedAdamWOptions(0.5).serialize(now);
  auto all = read_back(now);
  for (const std::string& key : all.keys()) {
    c10::IValue value;
    all.read(key, value);
    if (key != "state_version" && key != "optimizer") first.write(key, value);
  }
  auto options = FusedAdamWOptions(0.1).initial_lr(0.3);
  auto archive = read_back(first);
  options.serialize(archive);
  CHECK(options.lr() == 0.5);
  CHECK_FALSE(options.initial_lr().has_value());
}

TEST_CASE("archives go by name where both sides have names, whatever their order", "[resume]") {
  torch::manual_seed(11);
  const std::vector<std::string> names = {"a", "b", "c", "d"};
  std::vector<Tensor> values = random_parameters({{3}, {3}, {3}, {2}}, at::kFloat);
  const auto in_order = [&](const std::vector<size_t>& order, const std::string& prefix = "") {
    NamedParameters named;
    for (const size_t i : order) named.insert(prefix + names[i], values[i]);
    return named;
  };
  FusedAdamW source(in_order({0, 1, 2, 3}));
  for (int step = 0; step < 2; ++step) {
    set_random_gradients(values);
    source.step();
  }
  const std::string archive = saved(source);
  const auto is_own = [&](FusedAdamW& loaded, const std::vector<size_t>& state_of_source) {
    for (size_t i = 0; i < values.size(); ++i) {
      CHECK(state_of(loaded, values[i])
                .exp_avg()
                .equal(state_of(source, values[state_of_source[i]]).exp_avg()));
    }
  };
  FusedAdamW shuffled(in_order({2, 0, 1, 3}));
  load_from(shuffled, archive);
  is_own(shuffled, {0, 1, 2, 3});

  FusedAdamW renamed(in_order({0, 1, 2, 3}, "net."));
  const std::string message = refusal([&] { load_from(renamed, archive); });
  CHECK(contains(message, "no parameter \"net.a\""));
  CHECK(contains(message, "the first that it has is \"a\""));
  CHECK(renamed.state().empty());

  FusedAdamW unnamed({values[0], values[1], values[2], values[3]});  // in the order that was saved
  load_from(unnamed, archive);
  is_own(unnamed, {0, 1, 2, 3});
  load_from(shuffled, saved(unnamed));  // positions, as in torch
  is_own(shuffled, {1, 2, 0, 3});

  torch::optim::AdamW torchs(in_order({0, 1, 2, 3}).values());  // torch reads what it knows
  load_from(torchs, archive);
  CHECK(state_of(torchs, values[1]).exp_avg().equal(state_of(source, values[1]).exp_avg()));
}

}  // namespace pacer::testing
