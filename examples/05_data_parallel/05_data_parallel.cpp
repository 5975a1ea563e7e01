// Data parallelism, as small as a complete program gets: every rank trains the same byte model on its own
// part of the data, gradients are added up while backward still runs, and all replicas stay the same to the
// bit.
//
//   05_data_parallel --processes 4                  ranks on this machine, one GPU each where there are GPUs
//   torchrun --no-python --nproc-per-node 4 05_data_parallel
//   mpirun -n 4 05_data_parallel                    also srun
//   05_data_parallel                                one process: the same program, the same global batch
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include <torch/data.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/program.h"

namespace {

constexpr int64_t kContext = 16;  // bytes that the model sees
constexpr int64_t kBatch = 64;    // of all ranks together, so that the learning rate fits any number of them
constexpr int64_t kSteps = 200;

// Predicts a byte from the kContext bytes before it.
torch::nn::Sequential make_model() {
  constexpr int64_t kFeatures = 24, kHidden = 256, kBytes = 256;
  return torch::nn::Sequential(torch::nn::Embedding(kBytes, kFeatures), torch::nn::Flatten(),
                               torch::nn::Linear(kContext * kFeatures, kHidden), torch::nn::GELU(),
                               torch::nn::Linear(kHidden, kBytes));
}

// Example i: kContext bytes of the text from i on, and the byte that follows.
class TextWindows : public torch::data::Dataset<TextWindows> {
 public:
  explicit TextWindows(torch::Tensor text) : text_(std::move(text)) {}
  torch::data::Example<> get(size_t index) override {
    const auto i = static_cast<int64_t>(index);
    return {text_.narrow(0, i, kContext), text_[i + kContext]};
  }
  torch::optional<size_t> size() const override { return text_.size(0) - kContext; }

 private:
  torch::Tensor text_;  // int64 [bytes]
};

torch::Tensor read_text(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(file), {});
  return torch::from_blob(text.data(), {static_cast<int64_t>(text.size())}, torch::kUInt8).to(torch::kInt64);
}

void train(const std::shared_ptr<pacer::Communicator>& world) {
  pacer::require(kBatch % world->world_size() == 0, "a batch of ", kBatch, " cannot be shared evenly by ",
                 world->world_size(), " processes; start 1, 2, 4, 8 ...");
  torch::manual_seed(1);
  torch::set_num_threads(1);  // so small a model gains nothing from a second one
  auto model = make_model();
  model->to(world->device());
  TextWindows text(read_text(PACER_TORCH_INCLUDE_DIR "/ATen/core/TensorBody.h"));
  pacer::EpochSampler sampler(text.size().value(), /*seed=*/1, *world);  // this rank's part of every epoch
  auto loader = torch::data::make_data_loader(text.map(torch::data::transforms::Stack<>()), sampler,
                                              torch::data::DataLoaderOptions(kBatch / world->world_size()));
  pacer::FusedAdamW optimizer(model->named_parameters(), pacer::FusedAdamWOptions(3e-3).weight_decay(0.1));

  pacer::Session session(*model, optimizer, world);
  session.use(pacer::GradientClipping(1.0))
      .use(pacer::LearningRate(pacer::warmup_cosine({kSteps / 10, kSteps})))
      .use(sampler)
      .use(pacer::Metrics(pacer::MetricsOptions("run/05_data_parallel").every(50).total_steps(kSteps)));
  torch::Tensor loss;
  for (auto& batch : *loader) {
    auto [x, y] = session.begin(batch.data, batch.target);
    session.count_tokens(y.numel());
    loss = torch::cross_entropy_loss(model->forward(x), y);
    session.backward(loss);
    session.step();
    if (session.progress().step == kSteps) break;
  }
  session.finish();
  loss = loss.detach() / world->world_size();
  world->all_reduce(loss).wait();  // from each rank's part of the last batch to the mean over all of it
  if (world->rank() != 0) return;
  std::printf("loss %.3f nats per byte after %lld steps on %d processes, each sent %.1f MB\n",
              loss.item<double>(), static_cast<long long>(kSteps), world->world_size(),
              static_cast<double>(world->bytes_sent()) / 1e6);
}

}  // namespace

int main(int argument_count, char** arguments) {
  constexpr const char* kAbout =
      "Trains a byte model on LibTorch's own headers, every rank on its part of each batch.\n";
  return examples::run_as_ranks(argument_count, arguments, kAbout, train);
}
