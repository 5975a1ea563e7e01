// pacer-overlap-bench: how much of the gradient exchange hides behind backward. One process of a
// data-parallel job (run.py starts them, and PyTorch's DistributedDataParallel on the same model beside it).
// Each figure is the slowest rank's; rounds are medians.
//
//   pacer-overlap-bench MODEL [STEPS] [ROUNDS] [onebit]      MODEL: gpt2, bert-large or tiny
//
// With `onebit` it times steps of OneBitAdam after its freeze instead: momentum in one buffer and in buckets,
// behind backward and not.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/cuda.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>

#include <pacer/collectives/detail/alone_transport.h>
#include <pacer/collectives/detail/connect.h>
#include <pacer/pacer.h>

#include "bench/slowest.h"
#include "support/nearest_name.h"

namespace {

using bench::slowest;
using torch::Tensor;
namespace parts = pacer::detail;

struct Shape {
  std::string name;
  int64_t layers, width, heads, vocabulary, length, batch;
};

Shape shape_named(const std::string& name) {
  if (name == "gpt2") return {name, 12, 768, 12, 50257, 1024, 16};
  if (name == "bert-large") return {name, 24, 1024, 16, 30522, 512, 16};
  pacer::require(name == "tiny", "there is no model '", name, "'; ",
                 examples::suggestion(name, {"gpt2", "bert-large", "tiny"}));
  return {"tiny", 2, 64, 2, 1000, 64, 2};
}

// torch::nn::Linear adds its bias in a kernel of its own where its input has three dimensions; Python's does
// not.
Tensor project(torch::nn::Linear& linear, const Tensor& x) {
  return at::linear(x, linear->weight, linear->bias);
}

// The layers of a GPT, without dropout; ddp_peer.py builds the same.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t heads) : heads(heads) {
    const auto norm = torch::nn::LayerNormOptions({width});
    norm1 = register_module("norm1", torch::nn::LayerNorm(norm));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
    norm2 = register_module("norm2", torch::nn::LayerNorm(norm));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  Tensor forward(const Tensor& x) {
    const int64_t b = x.size(0), s = x.size(1), w = x.size(2);
    const auto parts =
        project(qkv, norm1(x)).view({b, s, 3, heads, w / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    const Tensor mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    const Tensor y = x + project(out, mixed.transpose(1, 2).reshape({b, s, w}));
    return y + project(down, torch::gelu(project(up, norm2(y)), "tanh"));
  }
  int64_t heads;
  torch::nn::LayerNorm norm1 = nullptr, norm2 = nullptr;
  torch::nn::Linear qkv = nullptr, out = nullptr, up = nullptr, down = nullptr;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const Shape& shape) : shape(shape) {
    tokens = register_module("tokens", torch::nn::Embedding(shape.vocabulary, shape.width));
    positions = register_module("positions", torch::nn::Embedding(shape.length, shape.width));
    for (int64_t i = 0; i < shape.layers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block(shape.width, shape.heads)));
    }
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width})));
  }
  Tensor loss(const Tensor& ids, const Tensor& targets) {
    // In this order, as Python does: backward then ends with the tied embedding. Operands of + have none in
    // C++.
    Tensor x = tokens(ids);
    x = x + positions(torch::arange(ids.size(1), ids.options()));
    for (auto& block : blocks) x = block(x);
    const Tensor logits = torch::linear(norm(x), tokens->weight);  // tied
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
  }
  Shape shape;
  torch::nn::Embedding tokens = nullptr, positions = nullptr;
  std::vector<Block> blocks;
  torch::nn::LayerNorm norm = nullptr;
};
TORCH_MODULE(Model);

using World = std::shared_ptr<pacer::Communicator>;
using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>, const World&)>;

std::unique_ptr<torch::optim::Optimizer> adamw(std::vector<Tensor> parameters, const World&) {
  return std::make_unique<pacer::FusedAdamW>(std::move(parameters), pacer::FusedAdamWOptions(1e-5));
}

struct Training {
  Training(
      const Shape& shape, const World& world, bool together,
      const std::function<void(pacer::Session&)>& hooks = [](pacer::Session&) {},
      const MakeOptimizer& make = adamw)
      : model(shape) {
    model->to(world->device());
    optimizer = make(model->parameters(), world);
    session = std::make_unique<pacer::Session>(
        *model, *optimizer, together ? world : pacer::Communicator::alone(world->device()));
    session->use(pacer::Precision::bf16());
    hooks(*session);
    const auto options = at::TensorOptions().dtype(at::kLong).device(world->device());
    ids = torch::randint(shape.vocabulary, {shape.batch, shape.length}, options);
  }
  void step() {
    auto [x] = session->begin(ids);
    session->backward(model->loss(x, x));
    session->step();
  }
  Model model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<pacer::Session> session;
  Tensor ids;
};

void print(pacer::Communicator& world, const std::string& what, double milliseconds) {
  if (world.rank() == 0) std::printf("| %s | %.3f |\n", what.c_str(), milliseconds);
}

void time_onebit(const Shape& shape, const World& world, int rounds, int steps) {
  const auto timed = [&](const std::string& what, std::optional<int64_t> mebibytes, bool overlap) {
    auto options = pacer::OneBitAdamOptions(1e-5).betas({0.9, 0.5}).freeze_step(2).overlap_backward(overlap);
    if (mebibytes) options.bucket_bytes(*mebibytes << 20);
    Training training(
        shape, world, true, [](pacer::Session&) {},
        [&](auto parameters, const World& ranks) {
          return std::make_unique<pacer::OneBitAdam>(std::move(parameters), options, ranks);
        });
    for (int i = 0; i < 4; ++i) training.step();
    print(*world, what, slowest(*world, rounds, steps, [&] { training.step(); }));
    training.session->finish();
  };
  timed("OneBitAdam step, one buffer", std::nullopt, false);
  timed("OneBitAdam step, one buffer, behind backward", std::nullopt, true);
  for (const int64_t mebibytes : {8, 25, 100}) {
    const std::string buckets = "OneBitAdam step, buckets of " + std::to_string(mebibytes) + " MiB";
    timed(buckets, mebibytes, false);
    timed(buckets + ", behind backward", mebibytes, true);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Shape shape = shape_named(argc > 1 ? argv[1] : "tiny");
  const int steps = argc > 2 ? std::atoi(argv[2]) : 10, rounds = argc > 3 ? std::atoi(argv[3]) : 7;
  const auto world = pacer::Communicator::from_environment();
  torch::manual_seed(1);

  double compute = 0;
  {
    Training alone(shape, world, false);
    if (world->rank() == 0) {
      int64_t count = 0;
      for (const Tensor& parameter : alone.model->parameters()) count += parameter.numel();
      std::printf(
          "\n%s, %.1f M parameters, %lld x %lld tokens a rank, %d ranks over %s, bf16 autocast\n\n"
          "| | ms |\n| --- | ---: |\n",
          shape.name.c_str(), static_cast<double>(count) * 1e-6, (long long)shape.batch,
          (long long)shape.length, world->world_size(), world->backend_name().c_str());
    }
    compute = slowest(*world, rounds, steps, [&] { alone.step(); });
    print(*world, "compute: a step without communication", compute);
  }
  if (argc > 4 && std::string(argv[4]) == "onebit") {
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
    parts::Meeting meeting;
    meeting.rank = meeting.local_rank = world->rank();
    meeting.world_size = meeting.local_size = world->world_size();
    meeting.host = "127.0.0.1";
    meeting.port = std::atoi(std::getenv("MASTER_PORT")) + 1;
    parts::Connection connection =
        parts::connect(meeting, pacer::CommunicatorOptions().backend(pacer::Backend::gloo));
    connection.data = parts::connect_alone(world->device()).data;
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
  if (world->rank() == 0) std::fflush(stdout);
  world->barrier();
}
