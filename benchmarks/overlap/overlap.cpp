// How much of the gradient exchange hides behind backward.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pacer/collectives/detail/alone_transport.h>
#include <pacer/collectives/detail/connect.h>
#include <pacer/pacer.h>

#include "subcommands.h"
#include "training.h"

namespace bench::overlap {
namespace {

constexpr const char* kAbout =
    R"(Measures how much of the gradient exchange hides behind backward. One process of a data-parallel
job: benchmarks/run.py starts them, and PyTorch's DistributedDataParallel on the same model beside
it. Each figure is the slowest rank's; rounds are medians.

  pacer-bench overlap MODEL [STEPS] [ROUNDS] [--onebit]
)";

namespace parts = pacer::detail;

int run(const examples::OptionValues& given) {
  const Shape shape = shape_named(given["model"].as<std::string>());
  const int64_t steps = number_in(given, "steps"), rounds = number_in(given, "rounds");
  const auto world = pacer::Communicator::from_environment();
  torch::manual_seed(1);

  double compute = 0;
  {
    Training alone(shape, world, false);
    if (world->rank() == 0) {
      int64_t count = 0;
      for (const Tensor& parameter : alone.model->parameters()) count += parameter.numel();
      std::printf("\n%s, %.1f M parameters, %lld x %lld tokens a rank, %d ranks over %s, bf16 autocast\n\n",
                  shape.name.c_str(), static_cast<double>(count) * 1e-6, (long long)shape.batch,
                  (long long)shape.gpt.length, world->world_size(), world->backend_name().c_str());
      print_head({"", "ms:"});
    }
    compute = slowest(*world, rounds, steps, [&] { alone.step(); });
    print(*world, "compute: a step without communication", compute);
  }
  if (given.count("onebit") != 0) {
    time_onebit(shape, world, rounds, steps);
    world->barrier();
    return 0;
  }
  double communication = 0, last = 0;
  {
    std::vector<Tensor> buckets;
    Training together(shape, world, true);
    for (int i = 0; i < 2; ++i) together.step();
    const auto* hook = dynamic_cast<const pacer::DataParallel*>(
        std::find_if(together.session->hooks().begin(), together.session->hooks().end(), [](const auto& h) {
          return h->hook_name() == "data_parallel";
        })->get());
    for (const int64_t bytes : hook->bucketer()->bucket_bytes()) {
      buckets.push_back(torch::zeros({bytes / 4}, at::TensorOptions().device(world->device())));
    }
    const auto options = pacer::CollectiveOptions().agreed(true);
    communication = slowest(*world, rounds, steps, [&] {
      std::vector<pacer::Work> works;
      for (const Tensor& bucket : buckets) works.push_back(world->all_reduce(bucket, options));
      for (pacer::Work& work : works) work.wait();
    });
    last = slowest(*world, rounds, steps, [&] { world->all_reduce(buckets.back(), options).wait(); });
    print(*world, "communication: all buckets alone", communication);
    print(*world, "the last bucket alone", last);
    const double step = slowest(*world, rounds, steps, [&] { together.step(); });
    print(*world, "DataParallel step", step);
    const double bound = std::max(compute, communication) + last;
    print(*world, "bound: max(compute, communication) + last bucket", bound);
    print(*world, "step / bound", step / bound);
    if (world->rank() == 0) {
      std::printf("buckets, MB:");
      for (const Tensor& bucket : buckets) std::printf(" %.1f", 4e-6 * static_cast<double>(bucket.numel()));
      std::printf("\n");
    }
    together.session->finish();
  }
  {
    // Hooks and copies into the buckets, but nothing is sent.
    const char* const port = std::getenv("MASTER_PORT");
    pacer::require(port != nullptr, "there is no MASTER_PORT; benchmarks/run.py and launchers set it");
    parts::RendezvousSettings settings;
    settings.rank = settings.local_rank = world->rank();
    settings.world_size = settings.local_size = world->world_size();
    settings.host = "127.0.0.1";
    settings.port = std::atoi(port) + 1;
    parts::Connection connection =
        parts::connect(settings, pacer::CommunicatorOptions().backend(pacer::CommunicatorBackend::gloo));
    // What is left out lives on: the other rank may still be joining it.
    const auto left_out = std::exchange(connection.data, parts::connect_alone(world->device()).data);
    const auto silent = std::make_shared<pacer::Communicator>(connection, pacer::CommunicatorOptions());
    Training training(shape, silent, true, [](pacer::Session& session) {
      session.use(pacer::DataParallel(pacer::DataParallelOptions().in_place(false)));
    });
    print(*world, "DataParallel step, buckets filled and not sent",
          slowest(*world, rounds, steps, [&] { training.step(); }));
    training.session->finish();
  }
  const auto timed = [&](const std::string& what, const std::function<void(pacer::Session&)>& hooks) {
    Training training(shape, world, true, hooks);
    print(*world, what, slowest(*world, rounds, steps, [&] { training.step(); }));
    training.session->finish();
  };
  for (const bool in_place : {true, false}) {
    timed(in_place ? "DataParallel step, gradients in place" : "DataParallel step, gradients in flat memory",
          [&](pacer::Session& session) {
            session.use(pacer::DataParallel(pacer::DataParallelOptions().in_place(in_place)));
          });
  }
  timed("DataParallel step, bf16 on the wire", [](pacer::Session& session) {
    session.use(pacer::DataParallel(pacer::DataParallelOptions().wire_dtype(at::kBFloat16)));
  });
  for (const int64_t mebibytes : {8, 25, 100, 400}) {
    const std::string what = "DataParallel step, buckets of " + std::to_string(mebibytes) + " MiB";
    timed(what, [&](pacer::Session& session) {
      session.use(pacer::DataParallel(pacer::DataParallelOptions().bucket_bytes(mebibytes << 20)));
    });
  }
  timed("DataParallel step, clipping",
        [](pacer::Session& session) { session.use(pacer::GradientClipping(1.0)); });
  world->barrier();
  return 0;
}

}  // namespace

Subcommand subcommand() {
  Subcommand overlap{
      "overlap", "how much of the gradient exchange hides behind backward, beside DistributedDataParallel",
      kAbout, run};
  overlap.options.add_options()  //
      ("model", word("gpt2|bert-large|tiny")->default_value("tiny"),
       "a GPT with the sizes of that model")              //
      ("steps", whole_number(10), "of a round")           //
      ("rounds", whole_number(7), "whose median counts")  //
      ("onebit",
       "instead time steps of OneBitAdam after its freeze, momentum in one buffer and in buckets, behind "
       "backward and not");
  overlap.without_dashes = "model,steps,rounds";
  return overlap;
}

}  // namespace bench::overlap
