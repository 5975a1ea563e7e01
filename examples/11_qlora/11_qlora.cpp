// Fine-tuning in little memory. A small decoder with Llama's module names learns one text in 16 bits and is
// saved. Then its weights are put in 4 bits and low-rank adapters learn another text. What to look at: the
// loss of both texts before and after, how few parameters were trained, how close that comes to adapters over
// 16 bits, and that the adapters, a small file, do their work on the 16-bit model, too, merged or not. On a
// GPU there is a limit on memory that training all parameters exceeds; 4 bits, adapters and paged optimizer
// state stay below it.
//
//   11_qlora                                   LibTorch's header of tensors, then a script of CMake
//   11_qlora --first a.txt --second b.txt      any two texts
//   11_qlora --fp8 --seed 2                    adapters over 4 bits also in 8-bit floats, beside 16
//   11_qlora --steps 12                        a look in a minute; CPUs without 16-bit products are slow here
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/cuda.h>
#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "gpu_memory.h"
#include "support/command_line.h"
#include "support/llama.h"
#include "support/program.h"

namespace {

using examples::Llama;
using torch::Tensor;

struct Sizes {
  examples::LlamaConfig model;
  int64_t batch, sequence, steps;
};

struct Choices {
  std::string first, second;  // files
  bool fp8;                   // adapters over 4 bits are trained in 8-bit floats, too
  uint64_t seed;
  int64_t steps;  // of each training; 0: as many as the losses need
};

Sizes sizes_for(bool on_gpu, int64_t steps) {
  Sizes sizes{{}, 8, 96, 120};
  sizes.model.key_value_heads = 2;
  if (on_gpu) {
    sizes = {{}, 4, 512, 200};
    sizes.model.hidden = 2048;
    sizes.model.intermediate = 5504;
    sizes.model.layers = 12;
    sizes.model.heads = 16;
    sizes.model.key_value_heads = 8;
  }
  if (steps > 0) sizes.steps = steps;
  return sizes;
}

constexpr int64_t kGpuLimit = int64_t{4} << 30;
constexpr const char* kFolder = "run/qlora";

// The bytes of a file, of which the last tenth is held out.
struct Text {
  Tensor training, held_out;
};

Text read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<uint8_t> bytes((std::istreambuf_iterator<char>(file)), {});
  pacer::require(bytes.size() > 20'000, path, " cannot be read, or is no text of 20,000 bytes or more");
  const Tensor all = torch::tensor(std::vector<int64_t>(bytes.begin(), bytes.end()));
  const int64_t split = all.size(0) * 9 / 10;
  return {all.narrow(0, 0, split), all.narrow(0, split, all.size(0) - split)};
}

// Rows of sequence + 1 bytes, from these places.
Tensor rows_at(const Tensor& text, const Tensor& places, int64_t sequence) {
  return text.index_select(0, (places.unsqueeze(1) + torch::arange(sequence + 1)).flatten())
      .view({places.size(0), sequence + 1});
}

Tensor loss_of(Llama& model, const Tensor& tokens, const Tensor& targets) {
  const Tensor logits = model(tokens);
  return at::cross_entropy_loss(logits.flatten(0, 1).to(torch::kFloat), targets.flatten());
}

// In nats a byte, over the text that was held out.
double held_out_loss(Llama& model, const Text& text, const Sizes& sizes, at::Device device) {
  const torch::NoGradGuard no_grad;
  model->eval();
  const int64_t rows = std::min<int64_t>(sizes.batch, text.held_out.size(0) / (sizes.sequence + 1));
  const Tensor places = torch::arange(rows) * (text.held_out.size(0) / rows - sizes.sequence - 1);
  const Tensor batch = rows_at(text.held_out, places, sizes.sequence).to(device);
  const double loss =
      loss_of(model, batch.narrow(1, 0, sizes.sequence), batch.narrow(1, 1, sizes.sequence)).item<double>();
  model->train();
  return loss;
}

// What adapters are trained over.
enum class Base { bf16, nf4, nf4_in_fp8 };

// `precision`: null for a model that computes in its own dtype.
void train(Llama& model, pacer::FusedAdamW& optimizer, const Text& text, const Sizes& sizes, uint64_t seed,
           std::shared_ptr<pacer::Precision> precision = nullptr) {
  pacer::Session session(*model, optimizer);
  session.use(pacer::GradientClipping(1.0))
      .use(pacer::LearningRate(pacer::warmup_cosine({sizes.steps / 10, sizes.steps})));
  if (precision) session.use(std::move(precision));
  torch::manual_seed(seed + 1);
  while (session.progress().step < sizes.steps) {
    const Tensor places = torch::randint(text.training.size(0) - sizes.sequence, {sizes.batch});
    const Tensor batch = rows_at(text.training, places, sizes.sequence);
    auto [x, y] = session.begin(batch.narrow(1, 0, sizes.sequence), batch.narrow(1, 1, sizes.sequence));
    auto loss = loss_of(model, x, y);
    session.backward(loss);
    session.step();
  }
  session.finish();
}

int64_t elements(const std::vector<Tensor>& tensors) {
  int64_t sum = 0;
  for (const Tensor& tensor : tensors) sum += tensor.numel();
  return sum;
}

Llama make_model(const Sizes& sizes, at::Device device, uint64_t seed) {
  torch::manual_seed(seed);
  Llama model(sizes.model);
  model->to(device, torch::kBFloat16);
  return model;
}

class Program {
 public:
  explicit Program(const Choices& choices)
      : choices_(choices), first_(read_text(choices.first)), second_(read_text(choices.second)) {}

  void run() {
    const std::string base = std::string(kFolder) + "/base.safetensors";
    {
      Llama model = make_model(sizes_, device_, choices_.seed);
      pacer::FusedAdamW optimizer(model->named_parameters(), pacer::FusedAdamWOptions(on_gpu_ ? 3e-4 : 3e-3));
      train(model, optimizer, first_, sizes_, choices_.seed);
      pacer::save_weights(*model, base);
      std::printf("%.1f M parameters, bf16; loss on held-out text, nats a byte   first  second\n",
                  static_cast<double>(elements(model->parameters())) / 1e6);
      report("trained on the first text", model);
    }
    if (on_gpu_) qlora::limit_gpu_memory(device_, kGpuLimit);
    if (on_gpu_) try_all_parameters(base);
    fine_tune(base, Base::bf16);
    fine_tune(base, Base::nf4);
    if (choices_.fp8) fine_tune(base, Base::nf4_in_fp8);
    use_adapters(base);
  }

 private:
  void report(const char* what, Llama& model) {
    std::printf("%-62s %6.3f  %6.3f\n", what, held_out_loss(model, first_, sizes_, device_),
                held_out_loss(model, second_, sizes_, device_));
    std::fflush(stdout);
  }

  void try_all_parameters(const std::string& base) {
    try {
      Llama model = make_model(sizes_, device_, choices_.seed);
      pacer::load_weights(*model, base);
      pacer::FusedAdamW optimizer(model->named_parameters(), pacer::FusedAdamWOptions(1e-4));
      train(model, optimizer, second_, sizes_, choices_.seed);
    } catch (const c10::OutOfMemoryError&) {
      std::printf("training all parameters does not fit into the %lld GB that this program may use\n",
                  static_cast<long long>(kGpuLimit >> 30));
      return;
    }
    throw pacer::Error("training all parameters was expected to run out of memory, but it did not");
  }

  // Where products of 16 bits and of 8 are compared, both run under autocast, so that nothing else differs.
  std::shared_ptr<pacer::Precision> precision_over(Base over) const {
    using pacer::Precision;
    if (over == Base::bf16 || !choices_.fp8) return nullptr;
    if (over == Base::nf4) return std::make_shared<Precision>(Precision::bf16());
    // The head, which comes last, has its weight in 16 bits and computes in them.
    return std::make_shared<Precision>(
        Precision::fp8(pacer::Fp8Options().quantized_weights(true).keep_last(1)));
  }

  void fine_tune(const std::string& base, Base over) {
    const bool in_4_bits = over != Base::bf16;
    Llama model = make_model(sizes_, torch::kCPU, choices_.seed);  // in 16 bits it need not fit on the GPU
    pacer::load_weights(*model, base);
    if (in_4_bits) pacer::modules::quantize(*model, pacer::modules::Nf4Options().targets({"*_proj"}));
    model->to(device_);
    if (over == Base::nf4) report("its weights in 4 bits", model);
    pacer::modules::add_lora(
        *model, pacer::modules::LoraOptions(on_gpu_ ? 16 : 8).alpha(16).dropout(0.05).targets({"*_proj"}));
    const auto trainable = pacer::modules::trainable(*model);
    pacer::FusedAdamWOptions options(on_gpu_ ? 5e-4 : 5e-3);
    if (on_gpu_) options.paged(pacer::Paging());
    pacer::FusedAdamW optimizer(trainable, options);
    train(model, optimizer, second_, sizes_, choices_.seed, precision_over(over));
    constexpr const char* kNames[] = {"adapters over 16 bits, trained on the second text",
                                      "adapters over 4 bits, trained on the second text",
                                      "adapters over 4 bits, trained in 8-bit floats"};
    report(kNames[static_cast<int>(over)], model);
    std::printf("    %.2f M parameters trained", static_cast<double>(elements(trainable.values())) / 1e6);
    if (on_gpu_) {
      std::printf("; %.2f GB of the GPU at rest",
                  static_cast<double>(qlora::gpu_memory_in_use(device_)) / 1e9);
    }
    std::puts("");
    if (over != Base::nf4) return;
    pacer::save_adapter(*model, std::string(kFolder) + "/adapter");
    pacer::save_weights(*model, std::string(kFolder) + "/base-nf4.safetensors");
  }

  // Adapters are files of their own: over the weights in 16 bits as over those in 4.
  void use_adapters(const std::string& base) {
    Llama model = make_model(sizes_, device_, choices_.seed);
    pacer::load_weights(*model, base);
    pacer::load_adapter(*model, std::string(kFolder) + "/adapter");
    report("these adapters over 16 bits", model);
    pacer::modules::merge(*model);
    report("merged into the 16-bit weights", model);
    pacer::modules::unmerge(*model);
    pacer::modules::set_adapter(*model, "");
    report("without adapters, as it was", model);
  }

  bool on_gpu_ = torch::cuda::is_available();
  at::Device device_ = on_gpu_ ? at::Device(torch::kCUDA, 0) : at::Device(torch::kCPU);
  Choices choices_;
  Sizes sizes_ = sizes_for(on_gpu_, choices_.steps);
  Text first_, second_;
};

int run(int argument_count, char** arguments) {
  namespace po = boost::program_options;
  constexpr const char* kAbout =
      "Trains a small decoder on one text, puts its weights in 4 bits, and fine-tunes it on another by\n"
      "low-rank adapters.\n";
  constexpr const char* kSecond =
      PACER_TORCH_INCLUDE_DIR "/../share/cmake/Caffe2/Modules_CUDA_fix/upstream/FindCUDA.cmake";
  auto known = examples::make_options();
  known.add_options()("first",
                      po::value<std::string>()->default_value(
                          PACER_TORCH_INCLUDE_DIR "/ATen/core/TensorBody.h", "LibTorch's header of tensors"),
                      "the text that all parameters learn")(
      "second", po::value<std::string>()->default_value(kSecond, "a script of CMake"),
      "the text that adapters learn")("fp8", po::bool_switch(),
                                      "train adapters over 4 bits in 8-bit floats, too, for comparison")(
      "seed", po::value<int64_t>()->default_value(1), "of initial values, batches and dropout")(
      "steps", po::value<int64_t>(), "of each training; 120 on a CPU and 200 on a GPU unless given");
  const auto given = examples::read_command_line(argument_count, arguments, kAbout, known);
  if (!given) return 0;
  Program({(*given)["first"].as<std::string>(), (*given)["second"].as<std::string>(),
           (*given)["fp8"].as<bool>(),
           static_cast<uint64_t>(examples::value_in<int64_t>(*given, "seed", 0, 1'000'000)),
           examples::value_in<int64_t>(*given, "steps", 1, 100'000, 0)})
      .run();
  return 0;
}

}  // namespace

int main(int argument_count, char** arguments) {
  return examples::run_guarded(examples::program_name(arguments),
                               [&] { return run(argument_count, arguments); });
}
