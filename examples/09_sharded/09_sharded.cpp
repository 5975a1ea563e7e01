// Sharded training: a model whose training does not fit into the memory that one rank may use, on ranks that
// share its gradients and its optimizer's state out between them, and then its parameters, too. What to look
// at: alone the first step fails, together it does not; nothing else in the loop has changed.
//
//   09_sharded --processes 2                        ranks on this machine, on its CPU
//   torchrun --no-python --nproc-per-node 2 09_sharded
//   mpirun -n 2 09_sharded                          also srun
#include <malloc.h>
#include <sys/resource.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include <torch/nn.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/byte_model.h"
#include "support/program.h"

namespace {

constexpr int64_t kMegabyte = 1'000'000;
constexpr int64_t kLimit = 500 * kMegabyte;  // what a rank may use beyond what it has at its start
constexpr int64_t kUnit = 16 * kMegabyte;    // of gradients on their way; a few exist at a time
constexpr int64_t kWidth = 2048, kBlocks = 8;
constexpr int64_t kBatch = 32;  // of all ranks together
constexpr int64_t kSteps = 12;

using World = std::shared_ptr<pacer::Communicator>;

struct BlockImpl : torch::nn::Module {
  torch::nn::LayerNorm norm{register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{kWidth}))};
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(kWidth, kWidth))};
  torch::Tensor forward(const torch::Tensor& x) { return x + torch::gelu(linear(norm(x))); }
};
TORCH_MODULE(Block);

// Predicts a byte from the examples::kContext bytes before it.
struct ModelImpl : torch::nn::Module {
  static constexpr int64_t kBytes = 256, kFeatures = kWidth / examples::kContext;
  torch::nn::Embedding entry{register_module("entry", torch::nn::Embedding(kBytes, kFeatures))};
  pacer::Blocks blocks{register_module("blocks", pacer::Blocks())};
  torch::nn::Linear head{register_module("head", torch::nn::Linear(kWidth, kBytes))};
  ModelImpl() {
    for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(Block());
  }
  torch::Tensor forward(const torch::Tensor& bytes) {
    torch::Tensor x = entry(bytes).flatten(1);
    for (size_t i = 0; i < blocks->size(); ++i) x = blocks->run(i, &BlockImpl::forward, x);
    return head(x);
  }
};
TORCH_MODULE(Model);

enum class Way { alone, shards, shards_of_blocks };

// Bytes of writable memory that this process has, as the kernel counts them against its limit.
int64_t memory_in_use() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kilobytes = 0;
    if (word == "VmData:" && status >> kilobytes) return kilobytes * 1024;
  }
  throw pacer::Error("/proc/self/status does not say how much memory is in use");
}

// The loss of the last step, and how much memory training took, in bytes.
struct Result {
  double loss;
  int64_t memory;
};

Result train(const World& world, Way way) {
  const int64_t before = memory_in_use();
  torch::manual_seed(1);
  Model model;
  pacer::FusedAdamW optimizer(model->named_parameters(), pacer::FusedAdamWOptions(3e-4));
  const auto windows = examples::read_windows(PACER_TORCH_INCLUDE_DIR "/ATen/core/TensorBody.h");
  pacer::EpochSampler sampler(static_cast<size_t>(windows.size(0)), /*seed=*/1, *world);
  pacer::Session session(*model, optimizer, world);
  session.use(pacer::GradientClipping(1.0)).use(sampler);
  if (way == Way::shards) session.use(pacer::Shards(pacer::ShardsOptions().unit_bytes(kUnit)));
  if (way == Way::shards_of_blocks) session.use(pacer::Shards(model->blocks));
  Result result{0, 0};
  while (session.progress().step < kSteps) {
    const auto rows = sampler.next(static_cast<size_t>(kBatch / world->world_size()));
    const auto batch =
        windows.index_select(0, torch::tensor(std::vector<int64_t>(rows->begin(), rows->end())));
    auto [x, y] = session.begin(batch.narrow(1, 0, examples::kContext), batch.select(1, examples::kContext));
    auto loss = torch::cross_entropy_loss(model->forward(x), y);
    session.backward(loss);
    session.step();
    result.loss = loss.item<double>();
  }
  session.finish();
  result.memory = memory_in_use() - before;
  return result;
}

bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
         std::string(error.what()).find("can't allocate memory") != std::string::npos;
}

void run(const World& world) {
  pacer::require(world->world_size() > 1 && kBatch % world->world_size() == 0, "a batch of ", kBatch,
                 " and its model cannot be shared out to ", world->world_size(),
                 " processes; start 2, 4, 8 ... with --processes or a launcher");
  torch::set_num_threads(1);
  mallopt(M_MMAP_THRESHOLD, 1 << 20);  // what is freed goes back to the system at once
  rlimit limit{};
  limit.rlim_cur = limit.rlim_max = static_cast<rlim_t>(memory_in_use() + kLimit);
  pacer::require<pacer::Error>(setrlimit(RLIMIT_DATA, &limit) == 0, "the memory limit could not be set");
  const bool speaks = world->rank() == 0;
  if (speaks) {
    int64_t parameters = 0;
    for (const auto& parameter : Model()->parameters()) parameters += parameter.numel();
    std::printf("%.1f M parameters, %lld MB for each rank\n", static_cast<double>(parameters) / 1e6,
                static_cast<long long>(kLimit / kMegabyte));
  }
  try {
    train(pacer::Communicator::alone(torch::kCPU), Way::alone);
    throw pacer::Error("one rank alone was expected to run out of memory, but it did not");
  } catch (const std::exception& error) {
    if (!is_out_of_memory(error)) throw;
    if (speaks) std::puts("alone: weights, gradients and optimizer state do not fit; share them out");
  }
  for (const Way way : {Way::shards, Way::shards_of_blocks}) {
    const Result result = train(world, way);
    if (!speaks) continue;
    std::printf("%s: loss %.3f nats per byte after %lld steps on %d processes, in %lld MB each\n",
                way == Way::shards ? "sharded" : "sharded, parameters, too", result.loss,
                static_cast<long long>(kSteps), world->world_size(),
                static_cast<long long>(result.memory / kMegabyte));
  }
}

}  // namespace

int main(int argument_count, char** arguments) {
  constexpr const char* kAbout =
      "Trains a model that is too large for the memory of one rank, on ranks that share out gradients, "
      "optimizer state and parameters.\nNeeds two processes or more, on a CPU.\n";
  return examples::run_as_ranks(argument_count, arguments, kAbout, run,
                                pacer::CommunicatorOptions().backend(pacer::CommunicatorBackend::gloo));
}
