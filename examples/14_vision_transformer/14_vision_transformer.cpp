// A vision transformer trained as such models usually are: AdamW, half a cosine behind a warm-up, drop path by
// sample with rates that rise with depth, and an exponential average of the weights. It takes images from a
// file, or draws some itself. What to look at: the last line, which has accuracy and loss on test images, with
// the weights and with their average.
//
//   14_vision_transformer                                  drawn shapes, a small model, seconds
//   digits.py run/digits.safetensors                       handwritten digits
//   14_vision_transformer --data run/digits.safetensors --layers 12 --width 192 --heads 3 --bf16 --drop-path 0.1
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/cuda.h>
#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "images.h"
#include "support/command_line.h"
#include "support/program.h"
#include "vision_transformer.h"

namespace {

struct Options {
  std::string data, checkpoints;  // a file and a folder; empty: none
  int64_t train;                  // images; 0: all
  VisionConfig model;
  int64_t batch, steps, warmup, every;
  double learning_rate, weight_decay, drop_path, label_smoothing, average_decay;
  bool bf16, on_gpu;
  int64_t seed;
};

// Matrices decay; biases, norms and positions do not, as vision transformers are usually trained.
std::vector<pacer::NamedParamGroup> groups_of(const VisionTransformer& model,
                                              const pacer::FusedAdamWOptions& options) {
  pacer::NamedParameters matrices, others;
  for (const auto& item : model->named_parameters()) {
    const bool decays = item.value().dim() > 1 && item.key() != "positions";
    (decays ? matrices : others).insert(item.key(), item.value());
  }
  pacer::FusedAdamWOptions without(options);
  without.weight_decay(0);
  std::vector<pacer::NamedParamGroup> groups;
  groups.emplace_back(matrices);
  groups.emplace_back(others, std::make_unique<pacer::FusedAdamWOptions>(without));
  return groups;
}

struct Measured {
  double accuracy, loss;  // the share that is named right, and nats per image
};

Measured measure(pacer::Session& session, VisionTransformer& model, const Images& images) {
  constexpr int64_t kBatch = 500;
  return session.evaluate([&] {
    torch::Tensor right = torch::zeros({}, images.pixels.options()), loss = torch::zeros_like(right);
    for (int64_t first = 0; first < images.count(); first += kBatch) {
      const int64_t count = std::min(kBatch, images.count() - first);
      const auto labels = images.labels.narrow(0, first, count);
      const auto logits = model->forward(images.pixels.narrow(0, first, count)).to(torch::kFloat);
      right += logits.argmax(1).eq(labels).sum();
      loss += torch::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum);
    }
    const auto count = static_cast<double>(images.count());
    return Measured{right.item<double>() / count, loss.item<double>() / count};
  });
}

void print_measured(pacer::Session& session, const std::string& head, const Measured& weights,
                    const Measured& average, const std::string& tail = {}) {
  constexpr size_t kLine = 200;
  char line[kLine];
  std::snprintf(line, sizeof line, "%s: weights %.2f %% right, loss %.4f; average %.2f %% right, loss %.4f%s",
                head.c_str(), 100 * weights.accuracy, weights.loss, 100 * average.accuracy, average.loss,
                tail.c_str());
  session.print(line);
}

// "3.2 of 4 layers": what each row of a batch is expected to keep.
std::string kept_by_row(const std::optional<pacer::LayerDrop>& drop_path, const pacer::Progress& progress,
                        int64_t layers) {
  constexpr size_t kText = 64;
  char text[kText];
  const double kept = drop_path ? (*drop_path)->kept_layers(progress) : static_cast<double>(layers);
  std::snprintf(text, sizeof text, "each image passes %.2f of %lld layers in training", kept,
                static_cast<long long>(layers));
  return text;
}

void run(const Options& options) {
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  const at::Device device(options.on_gpu ? at::kCUDA : at::kCPU);
  ImageSet images =
      options.data.empty() ? draw_images(options.train) : read_images(options.data, options.train);
  VisionConfig config = options.model;
  config.side = images.side;
  config.classes = images.classes;
  pacer::require(config.side % config.patch == 0, "--patch ", config.patch, " must divide the ", config.side,
                 " pixels of an image's side");
  for (Images* set : {&images.train, &images.test}) {
    *set = {set->pixels.to(device), set->labels.to(device)};
  }
  pacer::require(options.batch <= images.train.count(), "--batch ", options.batch, " is more than the ",
                 images.train.count(), " training images");
  VisionTransformer model(config);
  model->to(device);

  const auto recipe = pacer::FusedAdamWOptions(options.learning_rate).weight_decay(options.weight_decay);
  pacer::FusedAdamW optimizer(groups_of(model, recipe), recipe);
  pacer::EpochSampler sampler(static_cast<size_t>(images.train.count()), static_cast<uint64_t>(options.seed));
  // What is measured says itself when the model has the average.
  const auto average = std::make_shared<pacer::WeightAverage>(
      pacer::ema(options.average_decay).warm_up(true).in_evaluation(false));
  pacer::Session session(*model, optimizer);
  session.use(pacer::GradientClipping(1.0))
      .use(pacer::LearningRate(pacer::warmup_cosine({options.warmup, options.steps})))
      .use(sampler)
      .use(average);
  std::optional<pacer::LayerDrop> drop_path;
  if (options.drop_path > 0) {
    drop_path.emplace(model->blocks, pacer::LayerDropOptions()
                                         .theta_bar(1 - options.drop_path)
                                         .schedule(pacer::constant_schedule())
                                         .depth(pacer::DropDepth::from_zero)
                                         .per_sample(true)
                                         .seed(static_cast<uint64_t>(options.seed)));
    session.use(*drop_path);
  }
  if (options.bf16) session.use(pacer::Precision::bf16());
  if (!options.checkpoints.empty()) {
    session.use(pacer::Checkpoints(pacer::CheckpointsOptions(options.checkpoints).every(options.every)));
    session.resume();
  }
  const int64_t first = session.progress().step;
  pacer::require(first < options.steps, "the checkpoint in ", options.checkpoints, " is of step ", first,
                 "; raise --steps or choose another folder");
  session.print(kept_by_row(drop_path, session.progress(), config.layers));

  double seconds = 0;
  auto begin = std::chrono::steady_clock::now();
  const auto stop_clock = [&] {  // reads a number of the model: all that was enqueued has been done
    model->parameters().back().sum().item<double>();
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  const auto measure_average = [&] {
    const auto averaged = average->in_model();
    return measure(session, model, images.test);
  };
  while (session.progress().step < options.steps) {
    auto rows = sampler.next(static_cast<size_t>(options.batch));
    if (!rows) {
      sampler.reset();
      continue;
    }
    const std::vector<int64_t> chosen(rows->begin(), rows->end());
    const auto index = torch::tensor(chosen, torch::kInt64).to(device);
    auto [x, y] =
        session.begin(images.train.pixels.index_select(0, index), images.train.labels.index_select(0, index));
    const auto loss = torch::cross_entropy_loss(model->forward(x), y, {}, at::Reduction::Mean, -100,
                                                options.label_smoothing);
    session.backward(loss);
    session.step();
    const int64_t step = session.progress().step;
    if (step % options.every != 0 || step == options.steps) continue;
    stop_clock();
    constexpr size_t kText = 64;
    char head[kText];
    std::snprintf(head, sizeof head, "step %lld, training loss %.4f", static_cast<long long>(step),
                  loss.item<double>());
    print_measured(session, head, measure(session, model, images.test), measure_average());
    begin = std::chrono::steady_clock::now();
  }
  stop_clock();
  session.finish();
  constexpr size_t kText = 100;
  char head[kText], tail[kText];
  std::snprintf(head, sizeof head, "drop path %g, seed %lld, %lld images, %lld steps", options.drop_path,
                static_cast<long long>(options.seed), static_cast<long long>(images.train.count()),
                static_cast<long long>(options.steps));
  std::snprintf(tail, sizeof tail, "; %.0f images/s, %.1f s",
                static_cast<double>((options.steps - first) * options.batch) / seconds, seconds);
  print_measured(session, head, measure(session, model, images.test), measure_average(), tail);
}

std::optional<Options> read_options(int argument_count, char** arguments) {
  namespace po = boost::program_options;
  const auto whole = [](const char* name, int64_t value) {
    return po::value<int64_t>()->value_name(name)->default_value(value);
  };
  const auto real = [](double value, const char* shown) {
    return po::value<double>()->value_name("X")->default_value(value, shown);
  };
  const auto place = [](const char* name) {
    return po::value<std::string>()->value_name(name)->default_value("", "none");
  };
  auto known = examples::make_options();
  known.add_options()                                                                              //
      ("data", place("FILE"), "images of digits.py; without it shapes are drawn")                  //
      ("train", whole("N", 0), "only the first N training images; 0: all, or 2000 drawn ones")     //
      ("layers", whole("N", 4), "blocks")                                                          //
      ("width", whole("N", 48), "of a patch's vector")                                             //
      ("heads", whole("N", 3), "of attention; divides the width")                                  //
      ("patch", whole("N", 4), "pixels a side; divides an image's")                                //
      ("batch", whole("N", 64), "images in a step")                                                //
      ("steps", whole("N", 300), "of the run; the rate falls to 0 over them")                      //
      ("warmup", whole("N", 30), "steps in which the rate rises")                                  //
      ("learning-rate", real(1e-3, "0.001"), "at its peak")                                        //
      ("weight-decay", real(0.05, "0.05"), "of matrices")                                          //
      ("drop-path", real(0, "0"), "how often an image passes the last block by; the first never")  //
      ("label-smoothing", real(0, "0"), "in training")                                             //
      ("average-decay", real(0.999, "0.999"), "of the average of the weights")                     //
      ("bf16", examples::make_switch(), "forward in bfloat16")                                     //
      ("device", po::value<std::string>()->value_name("auto|cpu|cuda")->default_value("auto"),
       "where to train")                                                                         //
      ("seed", whole("N", 1), "of weights, order and dropped rows")                              //
      ("every", whole("N", 100), "steps between two measurements, and between two checkpoints")  //
      ("checkpoints", place("FOLDER"), "write checkpoints there, and go on from the newest one");
  const auto given = examples::read_command_line(
      argument_count, arguments,
      "Trains a vision transformer with drop path by sample and an average of its weights, on images of a\n"
      "file or on drawn shapes, and says what both make of test images.\n",
      known);
  if (!given) return std::nullopt;
  constexpr int64_t kMost = 1'000'000;
  const auto number = [&](const char* name, int64_t least) {
    return examples::value_in<int64_t>(*given, name, least, kMost);
  };
  Options options;
  options.data = (*given)["data"].as<std::string>();
  options.checkpoints = (*given)["checkpoints"].as<std::string>();
  options.train = number("train", 0);
  options.model = {0, 0, number("patch", 1), number("layers", 1), number("width", 1), number("heads", 1)};
  pacer::require(options.model.width % options.model.heads == 0, "--heads ", options.model.heads,
                 " must divide --width ", options.model.width);
  options.batch = number("batch", 1);
  options.steps = number("steps", 1);
  options.warmup = number("warmup", 0);
  options.every = number("every", 1);
  options.seed = number("seed", 0);
  options.learning_rate = examples::value_in<double>(*given, "learning-rate", 0, 1);
  options.weight_decay = examples::value_in<double>(*given, "weight-decay", 0, 1);
  constexpr double kMostDropped = 0.9;
  options.drop_path = examples::value_in<double>(*given, "drop-path", 0, kMostDropped);
  options.label_smoothing = examples::value_in<double>(*given, "label-smoothing", 0, kMostDropped);
  options.average_decay = (*given)["average-decay"].as<double>();
  options.bf16 = given->count("bf16") != 0 && (*given)["bf16"].as<bool>();
  enum class Where { automatic, cpu, cuda };
  const auto where = examples::choice_of<Where>(
      *given, "device", {{"auto", Where::automatic}, {"cpu", Where::cpu}, {"cuda", Where::cuda}});
  const bool has_gpu = torch::cuda::is_available();
  pacer::require(where != Where::cuda || has_gpu,
                 "--device cuda: no CUDA device can be used here; --device cpu always works");
  options.on_gpu = where != Where::cpu && has_gpu;
  return options;
}

}  // namespace

int main(int argument_count, char** arguments) {
  return examples::run_guarded(examples::program_name(arguments), [&] {
    const auto options = read_options(argument_count, arguments);
    if (options) run(*options);
    return 0;
  });
}
