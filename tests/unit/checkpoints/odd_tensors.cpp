// Tensors that files, copies and masks do not take as a matter of course: expanded buffers, complex and 8-bit
// numbers, sparse ones, parameters that lie elsewhere.
#include <filesystem>
#include <limits>

#include <ATen/ops/arange.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/files/checkpoint_folder.h>
#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/checkpoints/weight_files.h"
#include "support/collectives/ranks.h"
#include "support/session/mistakes_trainer.h"
#include "support/temporary_folder.h"

namespace pacer::testing::odd_tensors {
namespace {

// A layer with a buffer of whatever kind.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Tensor& odd) {
    linear = register_module("linear", torch::nn::Linear(3, 2));
    table = register_buffer("table", odd);
  }
  torch::nn::Linear linear = nullptr;
  Tensor table;
};
TORCH_MODULE(Net);

struct Run {
  explicit Run(const Tensor& odd) : net(odd), optimizer(net->parameters(), 0.1), session(net, optimizer) {}
  void step() {
    auto [x] = session.begin(torch::ones({4, 3}));
    session.backward(net->linear(x).square().mean());
    session.step();
  }
  Net net;
  FusedAdamW optimizer;
  Session session;
};

Tensor expanded() { return torch::ones({1, 8}).expand({4, 8}); }

std::vector<Tensor> odd_dtypes() {
  const Tensor numbers = torch::arange(-6, 6).to(torch::kFloat);
  return {torch::complex(numbers, 2 * numbers).reshape({3, 4}),
          torch::complex(numbers, 2 * numbers).conj(),
          numbers.to(torch::kFloat8_e4m3fn),
          numbers.to(torch::kFloat8_e5m2),
          numbers.abs().to(torch::kUInt16),
          numbers.abs().to(torch::kUInt32),
          numbers.abs().to(torch::kUInt64)};
}

std::string bytes_of(const Tensor& tensor) {
  const Tensor dense = tensor.detach().resolve_conj().contiguous();
  return {static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()};
}

// A file of safetensors with one tensor of another dtype behind the others.
void put_with_foreign_dtype(const std::string& path, const NamedTensors& tensors) {
  put_tensors_in(path, tensors);
  std::string text = content_of(path);
  uint64_t length = 0;
  std::memcpy(&length, text.data(), 8);
  std::string header = text.substr(8, length), data = text.substr(8 + length);
  header.erase(header.rfind('}'));
  header += ",\"packed\":{\"dtype\":\"F4\",\"shape\":[6],\"data_offsets\":[" + std::to_string(data.size()) +
            "," + std::to_string(data.size() + 3) + "]}}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  length = header.size();
  put_content(path, std::string(reinterpret_cast<const char*>(&length), 8) + header + data + "abc");
}

}  // namespace

TEST_CASE("an expanded buffer is refused before anything changes", "[mistakes]") {
  const TemporaryFolder folder;
  const std::vector<std::string> says = {"table", "expanded", "contiguous()"};
  Run run(expanded());
  run.session.use(Checkpoints(CheckpointsOptions(folder.path("c"))));
  CHECK(fault_of(heard_of([&] { run.step(); }), says) == "");
  CHECK(run.session.progress().step == 0);

  Run warmed(expanded());
  const auto prewarm = [&] {
    warmed.session.prewarm([&] { return warmed.net->linear(torch::ones({4, 3})).square().mean(); });
  };
  CHECK(fault_of(heard_of(prewarm), says) == "");

  const Net source(torch::zeros({4, 8}));
  put_tensors_in(folder.path("w.safetensors"), detail::model_tensors(*source));
  Net target(expanded());
  const Tensor before = target->linear->weight.detach().clone();
  CHECK(fault_of(heard_of([&] { load_weights(*target, folder.path("w.safetensors")); }), says) == "");
  CHECK(target->linear->weight.equal(before));

  const Ranks world = Communicator::in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    Net net(expanded());
    FusedAdamW optimizer(net->parameters());
    Session session(net, optimizer, world[static_cast<size_t>(rank)]);
    auto [x] = session.begin(torch::ones({4, 3}));
  });
  for (const std::string& message : messages) CHECK(fault_of(message, says) == "");
}

TEST_CASE("every dtype of safetensors is saved and resumed", "[checkpoint][resume]") {
  for (const Tensor& odd : odd_dtypes()) {
    CAPTURE(odd.scalar_type());
    const TemporaryFolder folder;
    {
      Run run(odd.clone());
      run.session.use(Checkpoints(CheckpointsOptions(folder.path("c")).every(1)));
      run.step();
      run.session.finish();
    }
    Run run(torch::zeros_like(odd));
    run.session.use(Checkpoints(CheckpointsOptions(folder.path("c"))));
    CHECK(run.session.resume() == 1);
    CHECK(bytes_of(run.net->table) == bytes_of(odd));

    Net loaded(torch::zeros_like(odd));
    load_weights(*loaded, folder.path("c"));
    CHECK(bytes_of(loaded->table) == bytes_of(odd));
    save_weights(*loaded, folder.path("w.safetensors"));
    CHECK(bytes_of(tensors_in(folder.path("w.safetensors")).at("table")) == bytes_of(odd));
  }
}

TEST_CASE("what no file can hold is refused before the first step", "[mistakes][checkpoint]") {
  const Tensor unsaved[] = {torch::zeros({2, 2}, torch::kComplexDouble), torch::eye(3).to_sparse()};
  for (const Tensor& odd : unsaved) {
    const TemporaryFolder folder;
    Run run(odd);
    run.session.use(Checkpoints(CheckpointsOptions(folder.path("c"))));
    CHECK(fault_of(heard_of([&] { run.step(); }), {"table", "keep it out of the model"}) == "");
    CHECK(run.session.progress().step == 0);
    Run best(odd);
    best.session.use(SaveBest(folder.path("b"))).use(Validation(1, [] { return 1.0; }));
    CHECK(fault_of(heard_of([&] { best.step(); }), {"table", "keep it out of the model"}) == "");
    CHECK(best.session.progress().step == 0);

    // Beside such a buffer the others load.
    put_tensors_in(folder.path("w.safetensors"), {{"linear.weight", torch::ones({2, 3})}});
    load_weights(*run.net, folder.path("w.safetensors"), LoadWeightsOptions().allow_missing(true));
    CHECK(run.net->linear->weight.equal(torch::ones({2, 3})));
  }
}

TEST_CASE("a tensor of an unknown dtype keeps nobody from the others", "[load_weights]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("w.safetensors");
  const NamedTensors tensors = {{"weight", torch::ones({2, 3})}, {"bias", torch::ones({2})}};
  put_with_foreign_dtype(path, tensors);
  torch::nn::Linear model(3, 2);
  CHECK(contains(heard_of([&] { load_weights(*model, path); }), "\"packed\""));
  load_weights(*model, path, LoadWeightsOptions().allow_unexpected(true));
  CHECK(model->weight.equal(torch::ones({2, 3})));

  struct Other : torch::nn::Module {
    Tensor packed = register_buffer("packed", torch::zeros({6}));
  } other;
  CHECK(fault_of(heard_of([&] { load_weights(other, path, LoadWeightsOptions().allow_unexpected(true)); }),
                 {"packed", "F4"}) == "");
}

TEST_CASE("weights are not loaded into parameters that Shards has released", "[mistakes][shards]") {
  const TemporaryFolder folder;
  const Ranks world = Communicator::in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    struct ModelImpl : torch::nn::Module {
      ModelImpl() {
        register_module("blocks", blocks);
        for (modules::Linear& layer : layers) blocks->push_back(layer);
        seen = register_buffer("seen", torch::zeros({3}));
      }
      Tensor forward(Tensor x) {
        for (size_t i = 0; i < 2; ++i)
          x = blocks->run(
              i, [&](const Tensor& h) { return layers[i](h); }, x);
        return x;
      }
      Blocks blocks;
      std::vector<modules::Linear> layers{modules::Linear(3, 3), modules::Linear(3, 3)};
      Tensor seen;
    } model;
    if (rank == 0) {
      NamedTensors ones;
      for (const auto& [name, tensor] : detail::model_tensors(model)) ones[name] = torch::ones_like(tensor);
      put_tensors_in(folder.path("w.safetensors"), ones);
    }
    FusedAdamW optimizer(model.parameters());
    Session session(model, optimizer, world[static_cast<size_t>(rank)]);
    session.use(Shards(model.blocks));
    auto [x] = session.begin(torch::ones({4, 3}));
    session.backward(model.forward(x).square().mean());
    session.step();
    std::string message;
    try {
      load_weights(model, folder.path("w.safetensors"));
    } catch (const std::exception& error) {
      message = error.what();
    }
    RANK_REQUIRE(fault_of(message, {"whole_parameters()", "Shards"}) == "");
    RANK_REQUIRE(model.seen.eq(0).all().item<bool>());
    session.finish();
  });
  CHECK(first_of(messages) == "");
}

TEST_CASE("a loss scale's factors name both ends of their range", "[mistakes]") {
  LossScaleRule rule;
  rule.growth_factor = 2e6;
  Trainer t;
  CHECK(fault_of(heard_of([&] { t.session.use(Precision::fp16(rule)); }),
                 {"growth_factor", "from 1 to 1e+06", "2e+06"}) == "");
}

TEST_CASE("the cut of every tensor of a batch is described", "[session]") {
  Trainer t;
  t.session.use(SequenceLength(SequenceLengthOptions(4, 8).ramp_steps(10)));
  const std::string heard = heard_of([&] {
    auto [x, square, mask] =
        t.session.begin(torch::ones({2, 8}), torch::ones({8, 8}), torch::ones({2, 1, 8, 8}));
  });
  CHECK(contains(heard, "dimension 1 of tensor 0, of shape [2, 8]"));
  CHECK(contains(heard, "dimension 1 of tensor 1, of shape [8, 8]"));
  CHECK(contains(heard, "dimensions 2 and 3 of tensor 2, of shape [2, 1, 8, 8]"));
  // A square one of two or three dimensions may be a mask, of which one side alone is cut.
  CHECK(contains(heard, "dimensions()"));
}

}  // namespace pacer::testing::odd_tensors
