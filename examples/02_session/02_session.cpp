// The training loop with a Session: a byte model on real text, LibTorch's own headers, with gradient
// accumulation, clipping, a learning-rate schedule and metrics. The loop stays ten lines, and yours.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <torch/data.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/program.h"

namespace {

constexpr int64_t kContext = 16;    // bytes that the model sees
constexpr int64_t kBatch = 32;      // per micro-step
constexpr int64_t kMicroSteps = 4;  // per optimizer step: an effective batch of 128
constexpr int64_t kSteps = 400;

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

torch::Tensor read_headers() {
  std::string text;
  for (const auto& entry : std::filesystem::directory_iterator(PACER_TORCH_INCLUDE_DIR "/ATen")) {
    if (!entry.is_regular_file() || text.size() > 1'000'000) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    text.append(std::istreambuf_iterator<char>(file), {});
  }
  const auto size = static_cast<int64_t>(text.size());
  return torch::from_blob(text.data(), {size}, torch::kUInt8).to(torch::kInt64);
}

void run() {
  torch::manual_seed(1);
  torch::set_num_threads(1);  // so small a model gains nothing from a second one
  auto model = make_model();
  const auto text = read_headers();
  const int64_t training_bytes = text.size(0) / 10 * 9;
  TextWindows training(text.narrow(0, 0, training_bytes));
  const auto held_out = text.narrow(0, training_bytes, text.size(0) - training_bytes);
  const auto windows = held_out.unfold(0, kContext + 1, /*step=*/5);  // [windows, kContext + 1]

  pacer::EpochSampler sampler(training.size().value(), /*seed=*/1);
  auto loader = torch::data::make_data_loader(training.map(torch::data::transforms::Stack<>()), sampler,
                                              torch::data::DataLoaderOptions(kBatch));

  pacer::FusedAdamW optimizer(model->named_parameters(), pacer::FusedAdamWOptions(3e-3).weight_decay(0.1));
  pacer::Session session(*model, optimizer);
  session.use(pacer::GradientAccumulation(kMicroSteps))
      .use(pacer::GradientClipping(1.0))
      .use(pacer::LearningRate(pacer::warmup_cosine({kSteps / 10, kSteps})))
      .use(sampler)
      .use(pacer::Metrics(pacer::MetricsOptions("run/02_session").every(50).total_steps(kSteps)));

  const auto held_out_loss = [&] {
    return session.evaluate([&] {
      const auto logits = model->forward(windows.narrow(1, 0, kContext));
      return torch::cross_entropy_loss(logits, windows.select(1, kContext)).item<double>();
    });
  };
  const double before = held_out_loss();

  for (auto& batch : *loader) {
    auto [x, y] = session.begin(batch.data, batch.target);
    session.count_tokens(y.numel());  // one prediction per window; batch x bytes would be counted otherwise
    session.backward(torch::cross_entropy_loss(model->forward(x), y));
    session.step();
    if (session.progress().step == kSteps) break;
  }
  session.finish();

  std::printf(
      "held-out loss in nats per byte: %.3f before, %.3f after %lld steps; curves in run/02_session\n",
      before, held_out_loss(), static_cast<long long>(session.progress().step));
}

}  // namespace

int main(int argument_count, char** arguments) {
  constexpr const char* kAbout =
      "Trains a byte model on LibTorch's own headers with accumulation, clipping, a learning-rate schedule\n"
      "and metrics. Writes curves to run/02_session.\n";
  return examples::run_program(argument_count, arguments, kAbout, run);
}
