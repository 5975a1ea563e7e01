// Mistakes with samplers, batches and devices that trained on without a word.
#include <torch/cuda.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/tensor.h>

#include "support/catch.h"
#include "support/session/mistakes_trainer.h"
#include "support/temporary_folder.h"

namespace pacer::testing::mistakes_data {
namespace {

auto loader_of(const EpochSampler& sampler) {
  auto data = torch::data::datasets::TensorDataset(torch::ones({8, 3}));
  return torch::data::make_data_loader(std::move(data), sampler, /*batch_size=*/4);
}

void train(Session& session, torch::nn::Linear& model, const EpochSampler& of_loader) {
  const auto loader = loader_of(of_loader);
  for (auto& batch : *loader) {
    std::vector<Tensor> rows;
    for (auto& example : batch) rows.push_back(example.data);
    auto [x] = session.begin(torch::stack(rows));
    session.backward(model->forward(x).square().mean());
    session.step();
  }
}

}  // namespace

TEST_CASE("a sampler that only one of Session and loader has is noticed", "[mistakes][sampler]") {
  const TemporaryFolder folder;
  {
    Trainer t;
    const EpochSampler of_session(8, 1), of_loader(8, 1);
    t.session.use(of_session);
    CHECK(fault_of(heard_of([&] { train(t.session, t.model, of_loader); }), {"EpochSampler", "the loader"}) ==
          "");
  }
  {
    Trainer t;
    const EpochSampler of_loader(8, 1);
    t.session.use(Checkpoints(CheckpointsOptions(folder.path("a"))));
    CHECK(fault_of(heard_of([&] { train(t.session, t.model, of_loader); }), {"session.use(sampler)"}) == "");
    t.session.finish();
  }
  Trainer t;
  const EpochSampler both(8, 1);
  t.session.use(Checkpoints(CheckpointsOptions(folder.path("b")))).use(both);
  CHECK(heard_of([&] { train(t.session, t.model, both); }) == "");
  t.session.finish();
}

TEST_CASE("two Sessions do not count the examples of one sampler", "[mistakes][sampler]") {
  const EpochSampler sampler(8, 1);
  {
    Trainer discriminator, generator;
    discriminator.session.use(sampler);
    CHECK(contains(heard_of([&] { generator.session.use(sampler); }), "in use by another Session"));
    discriminator.session.finish();
    generator.session.use(sampler);
  }
  Trainer later;
  later.session.use(sampler);
}

TEST_CASE("a resume with steps of another size is told of", "[mistakes][resume]") {
  const TemporaryFolder folder;
  {
    Trainer t;
    t.session.use(Checkpoints(CheckpointsOptions(folder.path("c"))));
    t.steps(1);
    t.session.finish();
  }
  Trainer t;
  t.session.use(Checkpoints(CheckpointsOptions(folder.path("c")))).use(GradientAccumulation(4));
  CHECK(fault_of(heard_of([&] { CHECK(t.session.resume() == 1); }),
                 {"1 micro-batches", "take 4", "4 times as many"}) == "");
}

TEST_CASE("a Batch that ends before the forward pass is told of", "[mistakes]") {
  Trainer t;
  t.session.use(Precision::bf16());
  const auto in_one_expression = [&] {
    t.session.backward(t.model->forward(t.session.begin(t.inputs).get<0>()).square().mean());
    t.session.step();
  };
  CHECK(heard_of(in_one_expression) == "");
  CHECK(heard_of([&] { t.micro_step(); }) == "");
  const auto of_a_temporary = [&] {
    const Tensor x = t.session.begin(t.inputs).get<0>();
    t.session.backward(t.model->forward(x).square().mean());
    t.session.step();
  };
  CHECK(fault_of(heard_of(of_a_temporary), {"without autocast", "auto [x, y]"}) == "");
}

TEST_CASE("a rank on a GPU that is not there is refused", "[mistakes]") {
  const auto beyond = static_cast<at::DeviceIndex>(torch::cuda::device_count());
  CHECK_THROWS_AS(Communicator::alone(at::Device(at::kCUDA, beyond)), Unavailable);
}

}  // namespace pacer::testing::mistakes_data
