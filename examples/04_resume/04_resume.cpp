// A run that can be stopped at any moment. Start it, kill it (Ctrl-C, kill -9, a power cut), start it again:
// it goes on from its last checkpoint, and every step has the bits it would have had. The printed hash of the
// weights shows it: it is the same for every step, however often the run was interrupted. So is each curve, in
// FOLDER/curves: TensorBoard shows every step once.
//
//   04_resume [FOLDER]     the run's folder; run/04_resume unless given
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include <torch/data.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include <pacer/files/checksum.h>
#include <pacer/pacer.h>

#include "support/command_line.h"
#include "support/program.h"

namespace {

constexpr int64_t kLength = 64, kWidth = 32, kBytes = 256, kBatch = 4, kSteps = 120;

// Bytes [B, S] to logits [B, S, 256]: a causal mean over what came before, and blocks that may be dropped.
struct ModelImpl : torch::nn::Module {
  torch::nn::Embedding bytes{register_module("bytes", torch::nn::Embedding(kBytes, kWidth))};
  torch::nn::Dropout dropout{register_module("dropout", torch::nn::Dropout(0.1))};
  torch::nn::Linear head{register_module("head", torch::nn::Linear(kWidth, kBytes))};
  pacer::LayerDropSequential blocks = nullptr;

  explicit ModelImpl(const pacer::LayerDrop& layer_drop)
      : blocks(register_module("blocks", pacer::LayerDropSequential(layer_drop))) {
    for (int i = 0; i < 4; ++i) {
      blocks->push_back(torch::nn::Sequential(torch::nn::Linear(kWidth, kWidth), torch::nn::GELU()));
    }
  }
  torch::Tensor forward(const torch::Tensor& ids) {
    const auto x = dropout(bytes(ids));
    const auto counts = torch::arange(1, ids.size(1) + 1, x.options()).unsqueeze(1);
    return head(blocks->forward(x + x.cumsum(1) / counts));
  }
};
TORCH_MODULE(Model);

// Example i: kLength bytes of the text and the bytes that follow each of them.
class TextPieces : public torch::data::Dataset<TextPieces> {
 public:
  explicit TextPieces(torch::Tensor text) : text_(std::move(text)) {}
  torch::data::Example<> get(size_t index) override {
    const auto start = static_cast<int64_t>(index) * kLength;
    return {text_.narrow(0, start, kLength), text_.narrow(0, start + 1, kLength)};
  }
  torch::optional<size_t> size() const override { return (text_.size(0) - 1) / kLength; }

 private:
  torch::Tensor text_;  // int64 [bytes]
};

torch::Tensor read_text(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(file), {});
  return torch::from_blob(text.data(), {static_cast<int64_t>(text.size())}, torch::kUInt8).to(torch::kInt64);
}

std::string hash_of_weights(const Model& model) {
  pacer::Checksum checksum;
  for (const auto& item : model->named_parameters()) {
    const auto values = item.value().detach().cpu().contiguous();
    checksum.add(values.data_ptr(), values.nbytes());
  }
  return checksum.hex();
}

void run(const std::string& folder) {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  pacer::LayerDrop layer_drop(pacer::LayerDropOptions().theta_bar(0.5).gamma(0.05));
  Model model(layer_drop);
  TextPieces text(read_text(PACER_TORCH_INCLUDE_DIR "/ATen/core/TensorBody.h"));
  pacer::EpochSampler sampler(200, /*seed=*/1);  // two epochs and more, of the first 200 pieces
  auto loader = torch::data::make_data_loader(text.map(torch::data::transforms::Stack<>()), sampler,
                                              torch::data::DataLoaderOptions(kBatch).workers(1));
  pacer::FusedAdamW optimizer(model->named_parameters(), pacer::FusedAdamWOptions(3e-3).weight_decay(0.1));

  pacer::Session session(*model, optimizer);
  session.use(pacer::GradientAccumulation(2))
      .use(pacer::GradientClipping(1.0))
      .use(pacer::SequenceLength(pacer::SequenceLengthOptions(16, kLength).ramp_steps(kSteps / 2)))
      .use(layer_drop)
      .use(pacer::LearningRate(pacer::warmup_cosine({kSteps / 10, kSteps})))
      .use(sampler)
      .use(pacer::Metrics(pacer::MetricsOptions(folder + "/curves").progress(false)))
      .use(pacer::Checkpoints(pacer::CheckpointsOptions(folder).every(3)));
  session.resume();

  while (session.progress().step < kSteps) {
    for (auto& batch : *loader) {
      auto [x, y] = session.begin(batch.data, batch.target);
      const auto logits = model->forward(x);
      session.backward(torch::cross_entropy_loss(logits.flatten(0, 1), y.flatten()));
      if (!session.step()) continue;
      const auto step = static_cast<long long>(session.progress().step);
      std::printf("step %lld, weights %s\n", step, hash_of_weights(model).c_str());
      std::fflush(stdout);
      if (step == kSteps) break;
    }
  }
  session.finish();
  std::printf("done after step %lld, weights %s\n", static_cast<long long>(session.progress().step),
              hash_of_weights(model).c_str());
}

}  // namespace

int main(int argument_count, char** arguments) {
  return examples::run_guarded(examples::program_name(arguments), [&] {
    auto known = examples::make_options();
    known.add_options()("folder",
                        boost::program_options::value<std::string>()->default_value("run/04_resume"),
                        "the run's folder; may be given without its name");
    const auto given = examples::read_command_line(
        argument_count, arguments,
        "Trains and saves checkpoints. Kill it at any moment and start it again: it goes on, and the hashes\n"
        "of the weights are those of a run that was never interrupted.\n",
        known, "folder");
    if (given) run((*given)["folder"].as<std::string>());
    return 0;
  });
}
