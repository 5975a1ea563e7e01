// LengthBuckets between LibTorch's DataLoader and a Session: the position, resume to the bit, what a checkpoint
// refuses, and the loader that drops batches.
#include <algorithm>
#include <memory>
#include <sstream>
#include <string>

#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/length_buckets.h>
#include <pacer/hooks/step_report.h>
#include <pacer/session/session.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"
#include "support/temporary_folder.h"

namespace pacer::testing::length_buckets_session {
namespace {

using Lengths = std::vector<int64_t>;

const Lengths kLengths{3, 9, 4, 16, 2, 8, 5, 1, 12, 7, 6, 4, 4};

LengthBucketsOptions budget() { return LengthBucketsOptions(24).bounds({4, 8, 16}).seed(2); }

// Example i has the number i kLengths[i] times; a batch is padded with -1 to its longest.
struct PaddedData : torch::data::datasets::BatchDataset<PaddedData, Tensor> {
  Tensor get_batch(c10::ArrayRef<size_t> request) override {
    int64_t longest = 0;
    for (const size_t index : request) longest = std::max(longest, kLengths[index]);
    const Tensor batch = torch::full({static_cast<int64_t>(request.size()), longest}, -1, at::kLong);
    for (size_t row = 0; row < request.size(); ++row) {
      batch[static_cast<int64_t>(row)]
          .narrow(0, 0, kLengths[request[row]])
          .fill_(static_cast<int64_t>(request[row]));
    }
    return batch;
  }
  std::optional<size_t> size() const override { return kLengths.size(); }
};

auto loader_of(const LengthBuckets& sampler, size_t workers, bool drop_last = false) {
  return torch::data::make_data_loader(
      PaddedData(), sampler,
      torch::data::DataLoaderOptions(sampler.largest_batch()).workers(workers).drop_last(drop_last));
}

class ReportProbe : public Hook {
 public:
  explicit ReportProbe(double& padding) : padding_(&padding) {}
  std::string hook_name() const override { return "report_probe"; }
  Slot slot() const override { return Slot::record; }
  void after_step(StepReport& report) override {
    for (const auto& [name, number] : report.numbers()) {
      if (name == "padding") *padding_ = number;
    }
  }

 private:
  double* padding_;
};

// A training loop over a DataLoader as users write it. The model is one number, which learns the mean over all
// tokens.
struct BucketRun {
  explicit BucketRun(size_t workers, const std::string& folder = "",
                     const LengthBucketsOptions& options = budget(), int64_t micro_steps = 1)
      : sampler(kLengths, options),
        model(torch::nn::LinearOptions(1, 1).bias(false)),
        optimizer(model->parameters(), 0.01),
        session(*model, optimizer),
        loader(loader_of(sampler, workers)) {
    const torch::NoGradGuard no_grad;
    model->weight.fill_(1);
    session.use(sampler)
        .use(ReportProbe(padding))
        .use(GradientAccumulation(GradientAccumulationOptions(micro_steps).weight_by_tokens(true)));
    if (folder.empty()) return;
    checkpoints = std::make_shared<Checkpoints>(CheckpointsOptions(folder));
    session.use(checkpoints);
  }
  std::optional<int64_t> resume() {
    const CapturedStderr quiet;
    return session.resume();
  }
  void train(int64_t epochs, int64_t steps = 1'000'000) {
    for (int64_t epoch = sampler.epoch(); epoch < epochs; ++epoch) {
      for (Tensor& batch : *loader) {
        micro_batch(batch);
        if (session.progress().step == steps) return;
      }
    }
  }
  void micro_batch(const Tensor& batch) {
    auto [ids] = session.begin(batch);
    const Tensor real = ids.masked_select(ids.ge(0)).to(at::kFloat);
    session.count_tokens(real.numel());
    session.backward((model->weight - real).square().mean());
    seen.push_back(batch);
    session.step();
  }

  LengthBuckets sampler;
  torch::nn::Linear model;
  torch::optim::SGD optimizer;
  Session session;
  decltype(loader_of(sampler, 0)) loader;
  std::shared_ptr<Checkpoints> checkpoints;
  double padding = -1;
  std::vector<Tensor> seen;
};

}  // namespace

TEST_CASE("stopped in any step, a run goes on with the batches that it has not trained on",
          "[session][buckets]") {
  constexpr int64_t kEpochs = 3;
  for (const size_t workers : {0, 2}) {
    for (const int64_t micro_steps : {1, 2}) {
      BucketRun whole(workers, "", budget(), micro_steps);
      whole.train(kEpochs);
      const int64_t steps = whole.session.progress().step;
      CHECK(whole.seen.size() == kEpochs * whole.sampler.batches_per_epoch());
      CHECK(whole.sampler.examples_trained() == static_cast<int64_t>(kLengths.size()));
      CHECK(whole.padding == whole.sampler.padding(kEpochs - 1));
      for (int64_t stop = 1; stop < steps; ++stop) {
        CAPTURE(workers, micro_steps, stop);
        const TemporaryFolder folder;
        {
          BucketRun stopped(workers, folder.path(), budget(), micro_steps);
          stopped.train(kEpochs, stop);
          stopped.checkpoints->save_now();
        }
        BucketRun resumed(workers, folder.path(), budget(), micro_steps);
        REQUIRE(resumed.resume() == stop);
        resumed.train(kEpochs);
        const auto before = static_cast<size_t>(stop * micro_steps);
        REQUIRE(resumed.seen.size() + before == whole.seen.size());
        for (size_t i = 0; i < resumed.seen.size(); ++i) {
          REQUIRE(resumed.seen[i].equal(whole.seen[before + i]));
        }
        REQUIRE(same_bits(resumed.model->weight, whole.model->weight));
        resumed.session.finish();
      }
      whole.session.finish();
    }
  }
}

TEST_CASE("a checkpoint of other lengths, options or another sampler is refused", "[session][buckets]") {
  const TemporaryFolder folder;
  {
    BucketRun run(0, folder.path());
    run.train(1, 2);
    run.checkpoints->save_now();
  }
  const auto fault = [&](const LengthBucketsOptions& options) {
    BucketRun other(0, folder.path(), options);
    const std::string fault = refusal([&] { other.resume(); });
    CHECK(other.sampler.examples_trained() == 0);
    return fault;
  };
  CHECK(contains(fault(budget().seed(3)),
                 "the LengthBuckets of the checkpoint has seed 2, but this one has 3"));
  for (const auto& options : {budget().tokens(25), budget().multiple(2).tokens(32), budget().cycles(1),
                              budget().bounds({4, 9, 16})}) {
    CHECK(contains(fault(options), "has other lengths or options"));
  }
  BucketRun uniform(0);
  torch::optim::SGD optimizer(uniform.model->parameters(), 0.1);
  Session session(*uniform.model, optimizer);
  session.use(EpochSampler(kLengths.size(), 2)).use(Checkpoints(CheckpointsOptions(folder.path())));
  const CapturedStderr quiet;
  CHECK(contains(refusal([&] { session.resume(); }), "hook/epoch_sampler/rules"));
}

TEST_CASE("an archive of LibTorch holds the place among the batches", "[session][buckets]") {
  const auto archive_of = [](const LengthBuckets& sampler) {
    torch::serialize::OutputArchive archive;
    sampler.save(archive);
    std::ostringstream file;
    archive.save_to(file);
    return file.str();
  };
  const auto load = [](EpochSampler& sampler, const std::string& text) {
    std::istringstream file(text);
    torch::serialize::InputArchive archive;
    archive.load_from(file);
    sampler.load(archive);
  };
  LengthBuckets sampler(kLengths, budget()), other(kLengths, budget().seed(9)),
      unlike(kLengths, budget().cycles(1));
  sampler.resume_at(1, 4);
  const std::string text = archive_of(sampler);
  load(other, text);
  while (const auto batch = sampler.next(20)) CHECK(other.next(20) == batch);
  CHECK_FALSE(other.next(20).has_value());
  CHECK(contains(refusal([&] { load(unlike, text); }), "with other lengths or options"));
  CHECK(unlike.epoch() == 0);
}

TEST_CASE("a Session has one sampler, and a sampler one Session", "[session][buckets]") {
  BucketRun run(0);
  CHECK(contains(refusal([&] { run.session.use(EpochSampler(9)); }), "already has the hook epoch_sampler"));
  torch::optim::SGD optimizer(run.model->parameters(), 0.1);
  Session second(*run.model, optimizer);
  CHECK(
      contains(refusal([&] { second.use(run.sampler); }), "this LengthBuckets is in use by another Session"));
  const auto worlds = Communicator::in_process(2);
  CHECK(contains(refusal([&] {
                   second.use(LengthBuckets({1, 2}, 4, *worlds[1]));
                 }),
                 "make it with LengthBuckets(lengths, options, *world)"));
  CHECK(
      contains(LengthBuckets(kLengths, budget()).hook()->agreement(), "13 examples, seed 2, LengthBuckets"));
  CHECK(LengthBuckets(kLengths, budget()).hook()->agreement() !=
        LengthBuckets(kLengths, budget().cycles(1)).hook()->agreement());
}

TEST_CASE("a loader that drops small batches is told of", "[session][buckets]") {
  for (const size_t workers : {0, 2}) {
    for (const bool drop_last : {true, false}) {
      CAPTURE(workers, drop_last);
      BucketRun run(workers);
      run.loader = loader_of(run.sampler, workers, drop_last);
      const CapturedStderr captured;
      for (int64_t epoch = 0; epoch < 2; ++epoch) {
        for (Tensor& batch : *run.loader) run.micro_batch(batch);
      }
      CHECK(contains(captured.text(), "drop_last(true) drops these") == drop_last);
    }
  }
}

TEST_CASE("more examples than were handed out are refused across batches, too", "[session][buckets]") {
  LengthBuckets sampler(kLengths, budget());
  CHECK(contains(refusal([&] { sampler.count(1); }), "a LengthBuckets that has handed out none"));
  const auto first = sampler.next(20), second = sampler.next(20);
  const auto both = static_cast<int64_t>(first->size() + second->size());
  CHECK(contains(refusal([&] { sampler.count(both + 1); }),
                 "only " + std::to_string(both) + " that the LengthBuckets"));
  sampler.count(both);
  CHECK(sampler.examples_trained() == both);
}

}  // namespace pacer::testing::length_buckets_session
