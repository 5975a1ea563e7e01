// EpochSampler inside LibTorch's DataLoader: permutations, their order, the position of a Session that trains
// while the loader reads ahead, and resume anywhere in an epoch.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>

#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/hooks/epoch_sampler.h>
#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/session/session.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/optimizers/optimizers.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using Indices = std::vector<int64_t>;

// Example i is the number i.
struct NumbersData : torch::data::datasets::BatchDataset<NumbersData, Tensor> {
  explicit NumbersData(size_t size) : size_(size) {}
  Tensor get_batch(c10::ArrayRef<size_t> request) override {
    return torch::tensor(Indices(request.begin(), request.end()));
  }
  std::optional<size_t> size() const override { return size_; }
  size_t size_;
};

struct LoaderKind {
  size_t workers;
  bool drop_last;
  int64_t micro_steps = 1;
};

constexpr size_t kExamples = 13, kBatch = 4;

auto loader_of(const EpochSampler& sampler, const LoaderKind& kind) {
  const auto options = torch::data::DataLoaderOptions(kBatch).workers(kind.workers).drop_last(kind.drop_last);
  return torch::data::make_data_loader(NumbersData(sampler.size()), sampler, options);
}

Indices numbers_of(const Tensor& batch) {
  return {batch.const_data_ptr<int64_t>(), batch.const_data_ptr<int64_t>() + batch.numel()};
}

// One number that learns the mean of a batch.
struct MeanModelImpl : torch::nn::Module {
  MeanModelImpl() : mean(register_parameter("mean", torch::zeros({}))) {}
  Tensor loss(const Tensor& batch) { return (batch.to(at::kFloat) - mean).square().mean(); }
  Tensor mean;
};
TORCH_MODULE(MeanModel);

// A training loop over a DataLoader as users write it.
struct LoaderRun {
  explicit LoaderRun(const LoaderKind& kind, const std::string& folder = "", size_t size = kExamples,
                     uint64_t seed = 5)
      : sampler(size, seed), optimizer(model->parameters(), 0.1), session(*model, optimizer) {
    session.use(sampler).use(GradientAccumulation(kind.micro_steps));
    if (!folder.empty()) {
      checkpoints = std::make_shared<Checkpoints>(CheckpointsOptions(folder));
      session.use(checkpoints);
    }
    loader = loader_of(sampler, kind);
  }
  std::optional<int64_t> resume() {
    const CapturedStderr quiet;
    return session.resume();
  }
  // Until so many epochs or steps are over.
  void train(int64_t epochs, int64_t steps = 1'000'000) {
    for (int64_t epoch = sampler.epoch(); epoch < epochs; ++epoch) {
      for (Tensor& batch : *loader) {
        REQUIRE(sampler.epoch() == epoch);
        micro_batch(batch);
        if (session.progress().step == steps) return;
      }
    }
  }
  void micro_batch(const Tensor& batch) {
    auto [x] = session.begin(batch);
    session.backward(model->loss(x));
    seen.push_back(numbers_of(x));
    session.step();
  }

  MeanModel model;
  EpochSampler sampler;
  torch::optim::SGD optimizer;
  Session session;
  std::shared_ptr<Checkpoints> checkpoints;
  decltype(loader_of(sampler, LoaderKind())) loader;
  std::vector<Indices> seen;  // by micro-batch
};

std::string archive_of(const EpochSampler& sampler) {
  torch::serialize::OutputArchive archive;
  sampler.save(archive);
  std::ostringstream file;
  archive.save_to(file);
  return file.str();
}

void load_sampler(EpochSampler& sampler, const std::string& text) {
  std::istringstream file(text);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  sampler.load(archive);
}

}  // namespace

TEST_CASE("the order of an epoch is a known permutation", "[session][sampler]") {
  // From a separate program in Python.
  CHECK(EpochSampler::order(10, 0, 0) == std::vector<size_t>{8, 2, 0, 5, 3, 1, 7, 9, 4, 6});
  CHECK(EpochSampler::order(10, 0, 1) == std::vector<size_t>{3, 1, 2, 5, 6, 7, 9, 0, 4, 8});
  CHECK(EpochSampler::order(10, 7, 0) == std::vector<size_t>{3, 4, 1, 7, 6, 2, 5, 0, 9, 8});
  CHECK(EpochSampler::order(10, ~uint64_t{0}, 3) == std::vector<size_t>{1, 3, 2, 6, 0, 8, 4, 9, 5, 7});
  CHECK(EpochSampler::order(1, 0, 0) == std::vector<size_t>{0});
  CHECK(contains(refusal([] { EpochSampler(0); }), "at least one example"));
}

TEST_CASE("every order of three comes up equally often", "[session][sampler]") {
  std::map<std::vector<size_t>, int> counts;
  for (int64_t epoch = 0; epoch < 6000; ++epoch) ++counts[EpochSampler::order(3, 1, epoch)];
  REQUIRE(counts.size() == 6);
  // 4 standard deviations of 6,000 draws of probability 1/6.
  for (const auto& [order, count] : counts) CHECK(std::abs(count - 1000) < 116);
}

TEST_CASE("in a DataLoader every epoch is another permutation", "[session][sampler]") {
  for (const size_t workers : {0, 2}) {
    for (const bool drop_last : {false, true}) {
      CAPTURE(workers, drop_last);
      std::set<Indices> orders;
      for (const uint64_t seed : {5, 6}) {
        EpochSampler sampler(kExamples, seed);
        const auto loader = loader_of(sampler, {workers, drop_last});
        for (int64_t epoch = 0; epoch < 4; ++epoch) {
          Indices order;
          for (const Tensor& batch : *loader) {
            REQUIRE(sampler.epoch() == epoch);
            const Indices numbers = numbers_of(batch);
            order.insert(order.end(), numbers.begin(), numbers.end());
          }
          const auto expected = EpochSampler::order(kExamples, seed, epoch);
          REQUIRE(order.size() == (drop_last ? kExamples / kBatch * kBatch : kExamples));
          REQUIRE(std::equal(order.begin(), order.end(), expected.begin()));
          REQUIRE(std::set<int64_t>(order.begin(), order.end()).size() == order.size());
          orders.insert(order);
        }
      }
      CHECK(orders.size() == 8);
    }
  }
}

TEST_CASE("the position counts examples trained on, not those read ahead", "[session][sampler]") {
  for (const size_t workers : {0, 2}) {
    LoaderRun run({workers, false});
    CHECK(run.sampler.epoch() == 0);
    CHECK(run.sampler.examples_trained() == 0);
    int64_t trained = 0;
    for (Tensor& batch : *run.loader) {
      run.micro_batch(batch);
      trained += batch.numel();
      CHECK(run.sampler.examples_trained() == trained);
    }
    CHECK(trained == kExamples);
    auto next = run.loader->begin();
    CHECK(run.sampler.epoch() == 1);
    CHECK(run.sampler.examples_trained() == 0);
    run.micro_batch(*next);
    CHECK(run.sampler.examples_trained() == kBatch);
  }
}

TEST_CASE("a micro-step that is begun again counts once", "[session][sampler]") {
  LoaderRun run({0, false});
  auto batch = run.loader->begin();
  (void)run.session.begin(*batch);
  CHECK(run.sampler.examples_trained() == 0);
  run.micro_batch(*batch);
  CHECK(run.sampler.examples_trained() == kBatch);
  // A forward pass outside the loop is no training.
  run.session.prewarm([&] { return run.model->loss(torch::ones({100})); });
  CHECK(run.sampler.examples_trained() == kBatch);
}

TEST_CASE("stopped anywhere, a run goes on with the examples that it has not trained on",
          "[session][sampler]") {
  constexpr int64_t kEpochs = 3;
  for (const LoaderKind& kind : {LoaderKind{0, false}, LoaderKind{0, true}, LoaderKind{2, false},
                                 LoaderKind{2, true}, LoaderKind{0, false, 3}, LoaderKind{2, true, 2}}) {
    LoaderRun whole(kind);
    whole.train(kEpochs);
    const int64_t steps = whole.session.progress().step;
    CHECK(whole.seen.size() == static_cast<size_t>(kEpochs * (kind.drop_last ? 3 : 4)));
    for (int64_t stop = 1; stop < steps; ++stop) {
      CAPTURE(kind.workers, kind.drop_last, kind.micro_steps, stop);
      const TemporaryFolder folder;
      {
        LoaderRun stopped(kind, folder.path());
        stopped.train(kEpochs, stop);
        stopped.checkpoints->save_now();
      }
      LoaderRun resumed(kind, folder.path());
      REQUIRE(resumed.resume() == stop);
      resumed.train(kEpochs);
      const auto first = whole.seen.begin() + stop * kind.micro_steps;
      REQUIRE(resumed.seen == std::vector<Indices>(first, whole.seen.end()));
      REQUIRE(resumed.sampler.epoch() == whole.sampler.epoch());
      REQUIRE(resumed.sampler.examples_trained() == whole.sampler.examples_trained());
      REQUIRE(same_bits(resumed.model->mean, whole.model->mean));
      resumed.session.finish();
    }
    whole.session.finish();
  }
}

TEST_CASE("another data set or seed is refused, and the sampler stays where it is", "[session][sampler]") {
  const TemporaryFolder folder;
  LoaderRun run({0, false}, folder.path());
  run.train(1, 2);
  run.checkpoints->save_now();
  LoaderRun larger({0, false}, folder.path(), kExamples + 1),
      reseeded({0, false}, folder.path(), kExamples, 6);
  CHECK(contains(refusal([&] { larger.resume(); }), "has size 13, but this one has 14"));
  CHECK(contains(refusal([&] { reseeded.resume(); }), "has seed 5, but this one has 6"));
  for (LoaderRun* each : {&larger, &reseeded}) {
    CHECK(each->sampler.epoch() == 0);
    CHECK(each->sampler.examples_trained() == 0);
    CHECK(each->session.progress().step == 0);
  }
  EpochSampler sampler(4);
  CHECK(contains(refusal([&] { sampler.reset(5); }), "another data set"));
  CHECK(contains(refusal([&] { sampler.resume_at(-1, 0); }), "epoch -1"));
  CHECK(contains(refusal([&] { sampler.resume_at(0, 5); }), "after 5"));
  CHECK(contains(refusal([&] { sampler.resume_at(0, -1); }), "after -1"));
  sampler.reset(4);
  CHECK(sampler.epoch() == 0);
}

TEST_CASE("an archive of LibTorch holds seed and position", "[session][sampler]") {
  EpochSampler sampler(kExamples, ~uint64_t{0}), other(kExamples, 1), smaller(kExamples - 1);
  sampler.resume_at(3, 5);
  sampler.reset();
  const std::string archive = archive_of(sampler);
  load_sampler(other, archive);
  CHECK(other.seed() == ~uint64_t{0});
  CHECK(other.epoch() == 3);
  CHECK(other.examples_trained() == 5);
  other.reset();
  const auto order = EpochSampler::order(kExamples, ~uint64_t{0}, 3);
  CHECK(other.next(100) == std::vector<size_t>(order.begin() + 5, order.end()));
  CHECK(other.next(100) == std::nullopt);
  CHECK(contains(refusal([&] { load_sampler(smaller, archive); }), "a sampler of 13 examples"));
  std::ostringstream empty;
  torch::serialize::OutputArchive().save_to(empty);
  CHECK(contains(refusal([&] { load_sampler(smaller, empty.str()); }), "no number \"size\""));
  CHECK(smaller.epoch() == 0);
  CHECK(smaller.seed() == 0);
}

TEST_CASE("a sampler that resumes goes on without a reset, too", "[session][sampler]") {
  EpochSampler sampler(9, 3);
  sampler.resume_at(2, 4);
  const auto order = EpochSampler::order(9, 3, 2);
  const auto batch = sampler.next(3);
  REQUIRE(batch.has_value());
  CHECK(*batch == std::vector<size_t>(order.begin() + 4, order.begin() + 7));
}

TEST_CASE("ranks share an epoch out, each as much as the others", "[session][sampler]") {
  const auto worlds = Communicator::in_process(4);
  const auto order = EpochSampler::order(11, 5, 0);
  for (int rank = 0; rank < 4; ++rank) {
    EpochSampler sampler(11, 5, *worlds[static_cast<size_t>(rank)]);
    const auto first = sampler.next(1), second = sampler.next(5);
    REQUIRE(first.has_value());
    REQUIRE(second.has_value());
    const auto r = static_cast<size_t>(rank);
    CHECK(*first == std::vector<size_t>{order[r]});
    CHECK(*second == std::vector<size_t>{order[4 + r]});
    CHECK_FALSE(sampler.next(1).has_value());
    sampler.count(2);
    CHECK(sampler.examples_trained() == 8);
  }
}

}  // namespace pacer::testing
