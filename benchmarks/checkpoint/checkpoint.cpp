// What a checkpoint costs a training, in time and memory.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <pacer/pacer.h>

#include "subcommands.h"
#include "support/ranks.h"
#include "support/table.h"
#include "support/value_in_file.h"  // of examples/

namespace bench::checkpoint {
namespace {

constexpr const char* kAbout =
    R"(Measures how long training waits for a checkpoint of AdamW's and the model's state, how long it
takes to resume, and by how much host memory grows meanwhile, on each rank.

  pacer-bench checkpoint GIGABYTES FOLDER
  torchrun --no-python --nproc-per-node 2 pacer-bench checkpoint 2 /data/run
)";

constexpr int64_t kWidth = 2048;  // a layer has 16 MiB of weights and 48 MiB of state in all

// Megabytes: VmRSS or VmHWM, its highest value since the last forget_peak().
double memory(const std::string& key) {
  return std::atof(examples::value_in_file("/proc/self/status", key).c_str()) / 1000;
}
void forget_peak() { std::ofstream("/proc/self/clear_refs") << 5; }

// Says how long `work` took and by how much memory grew at most.
template <class Work>
void measure(const pacer::Communicator& world, const std::string& what, const Work& work) {
  forget_peak();
  const double before = memory("VmRSS");
  const Stopwatch watch;
  work();
  const double seconds = watch.seconds();
  print_row({std::to_string(world.rank()), what, format("%.2f", seconds),
             format("%.0f", memory("VmHWM") - before), format("%.0f", memory("VmRSS") - before)});
}

struct Run {
  Run(World ranks, int64_t layers, const std::string& folder, bool synchronous) : world(std::move(ranks)) {
    for (int64_t i = 0; i < layers; ++i) {
      model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    }
    model->to(world->device());
    optimizer =
        std::make_unique<pacer::FusedAdamW>(model->named_parameters(), pacer::FusedAdamWOptions(1e-4));
    session = std::make_unique<pacer::Session>(*model, *optimizer, world);
    session->use(
        pacer::Checkpoints(pacer::CheckpointsOptions(folder).every(2).keep(1).synchronous(synchronous)));
  }
  void step() {
    auto [x] = session->begin(torch::ones({1, kWidth}));
    session->backward(model->forward(x).square().mean());
    session->step();
    synchronize(world->device());
  }

  World world;
  torch::nn::Sequential model;
  std::unique_ptr<pacer::FusedAdamW> optimizer;
  std::unique_ptr<pacer::Session> session;
};

int run(const examples::OptionValues& given) {
  pacer::require(given.count("gigabytes") + given.count("folder") == 2,
                 "it needs the gigabytes of a checkpoint and a folder; --help says more");
  const auto gigabytes = examples::value_in<double>(given, "gigabytes", 0, 1e6);
  const auto folder = given["folder"].as<std::string>();
  const auto layers = static_cast<int64_t>(gigabytes * 1e9 / (12.0 * kWidth * kWidth));
  const auto world = pacer::Communicator::from_environment();
  if (world->rank() == 0) {
    std::printf("%lld layers, %s, %d ranks\n", static_cast<long long>(layers), world->device().str().c_str(),
                world->world_size());
    print_head({"rank:", "what", "s:", "host memory, most, MB:", "after it:"});
  }
  for (const bool synchronous : {true, false}) {
    const std::string root = folder + (synchronous ? "/synchronous" : "/beside");
    std::filesystem::remove_all(world->rank() == 0 ? root : "");
    world->barrier();
    {
      Run run(world, layers, root, synchronous);
      run.step();
      const std::string how = synchronous ? ", training stands still" : ", beside training";
      measure(*world, "a step with the first save" + how, [&] { run.step(); });
      while (!std::filesystem::exists(root + "/step-0000000002")) std::this_thread::yield();
      measure(*world, "a step without", [&] { run.step(); });
      measure(*world, "a step with a later save" + how, [&] { run.step(); });
      run.session->finish();
    }
    Run run(world, layers, root, synchronous);
    measure(*world, "resume", [&] { run.session->resume(); });
    run.session->finish();
  }
  return 0;
}

}  // namespace

Subcommand subcommand() {
  Subcommand checkpoint{"checkpoint", "how long training waits for a save, and what a resume takes", kAbout,
                        run};
  checkpoint.options.add_options()("gigabytes", po::value<double>()->value_name("GIGABYTES"),
                                   "of weights and state together")(
      "folder", word("FOLDER"), "where checkpoints go; what is there is removed");
  checkpoint.without_dashes = "gigabytes,folder";
  return checkpoint;
}

}  // namespace bench::checkpoint
