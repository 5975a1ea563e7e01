// Trains for long with everything in use, and says at intervals what this rank holds: memory, descriptors,
// threads and files. soak.py judges whether that stays flat.
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include <ATen/ops/ones.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "optimizers.h"
#include "scenario.h"
#include "support/session/small_run.h"

namespace pacer::testing {
namespace soak {

// The number behind the last `key` of a text, 0 where there is none.
int64_t number_behind(const std::string& text, const std::string& key) {
  const size_t found = text.rfind(key);
  return found == std::string::npos ? 0 : std::atoll(text.c_str() + found + key.size());
}

// Bytes of this process in physical memory, as the kernel counts them page by page.
int64_t resident_bytes() {
  std::stringstream text;
  text << std::ifstream("/proc/self/smaps_rollup").rdbuf();
  return number_behind(text.str(), "\nRss:") * 1024;
}

// Bytes that malloc has given out and not got back, over all of its arenas.
int64_t heap_bytes() {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* stream = open_memstream(&text, &size);
  malloc_info(0, stream);
  std::fclose(stream);
  const std::string report(text, size);
  std::free(text);
  const auto bytes = [&report](const std::string& tag) {  // the last of a kind is the sum over arenas
    const size_t found = report.rfind(tag);
    return found == std::string::npos
               ? 0
               : number_behind(report.substr(found, report.find("/>", found) - found), "size=\"");
  };
  return bytes("<system type=\"current\"") + bytes("<total type=\"mmap\"") - bytes("<total type=\"fast\"") -
         bytes("<total type=\"rest\"");
}

int64_t device_bytes(at::Device device) {
  if (device.is_cpu()) return 0;
  const auto [free, total] = at::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
  return static_cast<int64_t>(total - free);
}

template <class Entries>
int64_t count_entries(const std::string& folder) {
  return std::distance(Entries(folder), Entries());
}

// One line on what this rank holds, while no rank does anything.
void say_holdings(Communicator& world, const std::string& folder, const std::string& phase, int64_t step) {
  using std::filesystem::directory_iterator, std::filesystem::recursive_directory_iterator;
  world.barrier();
  const int64_t files = count_entries<recursive_directory_iterator>(folder);
  world.barrier();
  std::ostringstream line;
  line << "holds " << phase << ' ' << step << " resident=" << resident_bytes() << " heap=" << heap_bytes()
       << " device=" << device_bytes(world.device())
       << " descriptors=" << count_entries<directory_iterator>("/proc/self/fd")
       << " threads=" << count_entries<directory_iterator>("/proc/self/task") << " files=" << files;
  say(line.str());
}

// Which optimizer, which hooks of the registry, and how ranks are joined.
struct Plan {
  const char* name;
  const char* optimizer;
  std::vector<std::string> hooks;
  std::function<void(SmallRun&)> join;
};

const std::vector<Plan> kPlans = {
    // Warm-up, freeze and the compressed phase.
    {"compressed",
     "OneBitAdam",
     {"accumulation", "clipping", "layer drop", "curriculum", "learning rate", "sampler"},
     [](SmallRun& run) {
       run.session->use(DataParallel(DataParallelOptions().bucket_bytes(600).first_bucket_bytes(100)));
     }},
    // The variance is refreshed, so that compressed and uncompressed steps follow each other.
    {"refreshed",
     "OneBitAdam refreshed",
     {"accumulation by tokens", "fp16", "layer drop", "curriculum by reshape", "learning rate"},
     [](SmallRun& run) { run.session->use(DataParallel()); }},
    // Parameters in parts, which blocks gather and recompute.
    {"sharded",
     "FusedAdamW bf16 remainder",
     {"accumulation", "clipping", "layer drop", "curriculum", "learning rate", "sampler", "recompute"},
     [](SmallRun& run) { run.session->use(Shards(run.model->stack)); }},
};

std::vector<RegisteredHook> hooks_named(const std::vector<std::string>& names) {
  std::vector<RegisteredHook> hooks;
  for (const RegisteredHook& hook : all_hooks()) {
    if (std::count(names.begin(), names.end(), hook.name)) hooks.push_back(hook);
  }
  return hooks;
}

struct Trainer {
  // Checkpoints every 100 steps beside training, of which two stay; a record of every tenth step.
  Trainer(const Plan& plan, const std::shared_ptr<Communicator>& world, const std::string& folder,
          int64_t validate_every = 100, bool tensorboard = true)
      : run(optimizer_named(plan.optimizer), hooks_named(plan.hooks), /*dropout=*/0.1, world),
        checkpoints(
            std::make_shared<Checkpoints>(CheckpointsOptions(folder + "/checkpoints").every(100).keep(2))) {
    const auto measure = [model = run.model, device = world->device()]() mutable {
      const auto batch = small_batch(99);
      return model->loss(batch.first.to(device), batch.second.to(device)).item<double>();
    };
    plan.join(run);
    run.session->use(checkpoints)
        .use(Metrics(MetricsOptions(folder + "/metrics").every(10).progress(false).tensorboard(tensorboard)))
        .use(SaveBest(folder + "/best"))
        .use(Validation(ValidationOptions(validate_every), measure));
  }

  SmallRun run;
  std::shared_ptr<Checkpoints> checkpoints;
};

// What is made again and again, and how often it is looked at meanwhile.
struct Rounds {
  int64_t count, looks;
  bool has_look(int64_t round) const { return round % (count / looks) == 0; }
};

// One Session for all steps.
void train(const std::shared_ptr<Communicator>& world, const Plan& plan, const std::string& folder,
           const Rounds& steps) {
  Trainer trainer(plan, world, folder, std::min<int64_t>(100, steps.count / steps.looks));
  for (int64_t step = 1; step <= steps.count; ++step) {
    trainer.run.step();
    if (!steps.has_look(step)) continue;
    trainer.checkpoints->save_now();
    say_holdings(*world, folder, plan.name, step);
  }
  trainer.run.finish();
}

// A Session, made, resumed and ended again and again. Each would add a file of TensorBoard's.
void resume_often(const std::shared_ptr<Communicator>& world, const Plan& plan, const std::string& folder,
                  const Rounds& rounds) {
  for (int64_t round = 1; round <= rounds.count; ++round) {
    {
      Trainer trainer(plan, world, folder, /*validate_every=*/100, /*tensorboard=*/false);
      trainer.run.resume();
      for (int step = 0; step < 5; ++step) trainer.run.step();
      trainer.run.finish();
    }
    if (rounds.has_look(round)) say_holdings(*world, folder, std::string("resumed-") + plan.name, round);
  }
}

// Groups and lanes, made, used and dropped. c10d keeps 120 bytes of each thread that its process groups ever
// had, about 500 bytes a round here; nothing else grows.
void split_often(const std::shared_ptr<Communicator>& world, const std::string& folder,
                 const Rounds& rounds) {
  const Tensor x = at::ones({100}, at::TensorOptions().device(world->device()));
  for (int64_t round = 1; round <= rounds.count; ++round) {
    {
      const auto named = world->split(0, world->rank(), "named");
      const auto unnamed = world->split(0, -world->rank());
      const auto alone = named->split(world->rank(), 0);
      const auto lane = unnamed->lane("side");
      for (const auto& group : {named, unnamed, alone, lane}) group->all_reduce(x).wait();
    }
    if (rounds.has_look(round)) say_holdings(*world, folder, "split", round);
  }
}

// Communicators of all ranks, one after the other.
void connect_often(const Player& player, const std::shared_ptr<Communicator>& world,
                   const std::string& folder, const Rounds& rounds) {
  for (int64_t round = 1; round <= rounds.count; ++round) {
    const std::string meeting = detail::concatenate(player.text("file"), "-", round);
    Communicator::from_file(meeting, player.rank, player.world_size, player.options())->barrier();
    world->barrier();
    if (world->rank() == 0) std::filesystem::remove_all(meeting);
    if (rounds.has_look(round)) say_holdings(*world, folder, "connected", round);
  }
}

// steps=N of each plan with looks=N at each, and in proportion what is made again and again.
const AddScenario kSoak("soak", [](const Player& player) {
  const auto options = player.options();
  const auto world = std::make_shared<Communicator>(detail::connect(player.settings(), options), options);
  const std::string folder = player.text("folder");
  const Rounds steps{player.number("steps"), player.number("looks")};
  const Rounds rounds{std::max(steps.looks, steps.count / 200), steps.looks};
  for (const Plan& plan : kPlans) {
    if (player.has("plan") && player.text("plan") != plan.name) continue;
    const std::string own = folder + "/" + plan.name;
    train(world, plan, own, steps);
    resume_often(world, plan, own, rounds);
  }
  split_often(world, folder, rounds);
  connect_often(player, world, folder, rounds);
});

}  // namespace soak
}  // namespace pacer::testing
