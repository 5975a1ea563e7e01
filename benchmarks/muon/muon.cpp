// What a step of Muon costs beside its matrix products.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <torch/version.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/orthogonalize.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/muon.h>

#include "models.h"
#include "subcommands.h"
#include "support/device.h"
#include "support/gpu_time.h"
#include "support/table.h"
#include "support/timing.h"

namespace bench::muon {
namespace {

constexpr const char* kAbout =
    R"(Measures a step of pacer::Muon over the parameters of a model, with random gradients, beside its
matrix products alone and beside a step of pacer::FusedAdamW over all parameters. Hidden matrices
take Muon's rule; embeddings, head and vectors take AdamW's. benchmarks/muon/peer.py measures
torch.optim.Muon with torch.optim.AdamW(fused=True) over the same shapes.

  pacer-bench muon                            1.345 billion parameters on a GPU, half a million on a CPU
  pacer-bench muon --model gpt2 --dtype fp32

All take their turns, round after round, and medians of the rounds are printed. Three times are given
for a GPU: device, between two events around the step behind a kernel that spins while the host
enqueues it; whole, from an idle GPU to an idle GPU; and host, until the call returns. The products
alone are the five iterations that make batches of matrices orthogonal, in bf16 on a GPU and in fp32
on a CPU. A step is to take 1.10 times as long as they do, or less. TFLOP/s count only their
operations, 5 (4 r^2 c + 2 r^3) for r rows and c columns, r <= c.
)";

using torch::Tensor;

constexpr int64_t kIterations = 5;

std::vector<Tensor> random_tensors(const Shapes& shapes, const at::TensorOptions& options) {
  constexpr double kDeviation = 0.1;
  std::vector<Tensor> tensors;
  for (const auto& shape : shapes) tensors.push_back(at::empty(shape, options).normal_(0, kDeviation));
  return tensors;
}

// Shared by all contenders, because each only reads them.
struct Gradients {
  std::vector<Tensor> hidden, rest;
};

// Returns new parameters that have these gradients.
std::vector<Tensor> parameters_with(const std::vector<Tensor>& gradients) {
  constexpr double kDeviation = 0.02;
  std::vector<Tensor> parameters;
  for (const Tensor& gradient : gradients) {
    parameters.push_back(at::empty_like(gradient).normal_(0, kDeviation).requires_grad_());
    parameters.back().mutable_grad() = gradient;
  }
  return parameters;
}

struct Contender {
  std::string name;
  std::function<void()> run;  // enqueues all work of a step on the current stream
  bool has_products;
};

Contender make_muon(const std::string& name, const Gradients& gradients, const pacer::MuonOptions& options) {
  const auto group = [](const std::vector<Tensor>& of, const pacer::MuonOptions& with) {
    return torch::optim::OptimizerParamGroup(parameters_with(of), std::make_unique<pacer::MuonOptions>(with));
  };
  const std::vector<torch::optim::OptimizerParamGroup> groups = {
      group(gradients.hidden, options),
      group(gradients.rest, pacer::MuonOptions(options).orthogonalize(false))};
  const auto optimizer = std::make_shared<pacer::Muon>(groups);
  return {name, [optimizer] { optimizer->step(); }, true};
}

Contender make_adamw(const Gradients& gradients) {
  std::vector<Tensor> all = gradients.hidden;
  all.insert(all.end(), gradients.rest.begin(), gradients.rest.end());
  const auto optimizer = std::make_shared<pacer::FusedAdamW>(
      parameters_with(all), pacer::FusedAdamWOptions(1e-3).weight_decay(0.1));
  return {"pacer::FusedAdamW, all parameters", [optimizer] { optimizer->step(); }, false};
}

// The matrices lie in memory as Muon's directions do, and go through the products in batches as large as
// Muon's.
Contender make_products(const Model& model, int64_t at_once, at::Device device) {
  const auto options =
      at::TensorOptions().device(device).dtype(device.is_cuda() ? at::kBFloat16 : at::kFloat);
  std::vector<Tensor> batches;
  for (const MatrixCount& of : model.matrices()) {
    const Tensor all = at::empty({of.count, of.rows, of.columns}, options).normal_();
    const int64_t matrices = std::max<int64_t>(1, at_once / (of.rows * of.columns));
    for (const Tensor& batch : all.split(matrices)) batches.push_back(batch);
  }
  return {"products alone",
          [batches] {
            const at::NoGradGuard no_grad;
            for (const Tensor& batch : batches) {
              pacer::detail::orthogonalized(batch, pacer::MuonCoefficients::quintic, kIterations,
                                            /*scale=*/1);
            }
          },
          true};
}

struct Times {
  Spread device, whole, host;  // device only on a GPU
};

std::vector<Times> measure(const std::vector<Contender>& contenders, at::Device device,
                           const Patience& patience) {
  struct Samples {
    std::vector<double> device, whole, host;
    double spin_milliseconds = 0;
  };
  constexpr int kUncounted = 3;  // the first makes the state
  std::vector<Samples> all(contenders.size());
  for (size_t i = 0; i < contenders.size(); ++i) {
    double host_milliseconds = 0;
    for (int k = 0; k < kUncounted; ++k) {
      synchronize(device);
      const Stopwatch watch;
      contenders[i].run();
      host_milliseconds = watch.milliseconds();
    }
    all[i].spin_milliseconds = 0.1 + 1.5 * host_milliseconds;
  }
  const Stopwatch since;
  for (int64_t round = 0; patience.lasts(round, since); ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      synchronize(device);
      std::this_thread::sleep_for(kSettling);
      const Stopwatch watch;
      contenders[i].run();
      all[i].host.push_back(watch.milliseconds());
      synchronize(device);
      all[i].whole.push_back(watch.milliseconds());
      if (!device.is_cuda()) continue;
      const Patience once = {1, 1, 0};
      all[i].device.push_back(time_enqueued(contenders[i].run, all[i].spin_milliseconds, once).median);
    }
  }
  std::vector<Times> times;
  for (const Samples& of : all) {
    times.push_back({spread_of(of.device), spread_of(of.whole), spread_of(of.host)});
  }
  return times;
}

struct Measured {
  Contender contender;
  Times times;
};

// The first is Muon, the second its products alone.
void print_table(const std::vector<Measured>& all, double operations, bool on_gpu) {
  // Ratios are of the device's own time, which no host delays.
  const auto milliseconds = [&](const Measured& one) {
    return on_gpu ? one.times.device.median : one.times.whole.median;
  };
  const double products = milliseconds(all[1]);
  print_head(
      on_gpu ? std::vector<std::string>{"", "device ms:", "whole ms:", "host ms:", "of products:", "TFLOP/s:"}
             : std::vector<std::string>{"", "ms:", "of products:", "TFLOP/s:"});
  for (const Measured& one : all) {
    std::vector<std::string> cells = {one.contender.name, milliseconds_text(milliseconds(one))};
    if (on_gpu) {
      cells.push_back(milliseconds_text(one.times.whole.median));
      cells.push_back(milliseconds_text(one.times.host.median));
    }
    cells.push_back(format("%.3f", milliseconds(one) / products));
    const double rate = operations / milliseconds(one) * 1e-9;
    cells.push_back(one.contender.has_products ? format(on_gpu ? "%.0f" : "%.4f", rate) : "");
    print_row(cells);
  }
  std::printf("\nstep / products alone: %.3f; 1.10 or less is the aim\n", milliseconds(all[0]) / products);
}

int run(const examples::OptionValues& given) {
  using ModelOf = Model (*)();
  const std::string gpu = gpu_name();
  const bool on_gpu =
      examples::choice_of<bool>(given, "device", {{"auto", !gpu.empty()}, {"cpu", false}, {"cuda", true}});
  const auto dtype =
      examples::choice_of<at::ScalarType>(given, "dtype", {{"bf16", at::kBFloat16}, {"fp32", at::kFloat}});
  const Model model = examples::choice_of<ModelOf>(
      given, "model",
      {{"auto", on_gpu ? &gpt : &tiny}, {"gpt", &gpt}, {"gpt2", &gpt2_small}, {"tiny", &tiny}})();
  const int64_t rounds = number_in(given, "rounds"), at_once = number_in(given, "at-once");
  pacer::require<pacer::Unavailable>(!on_gpu || !gpu.empty(),
                                     "--device cuda needs an NVIDIA GPU, and this machine or build has none");

  const at::Device device = on_gpu ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  torch::manual_seed(1);
  const auto options = at::TensorOptions().device(device).dtype(dtype);
  const Gradients gradients = {random_tensors(model.hidden, options), random_tensors(model.rest, options)};
  std::vector<Contender> contenders;
  contenders.push_back(make_muon("pacer::Muon", gradients, pacer::MuonOptions(1e-3)));
  contenders.push_back(make_products(model, at_once, device));
  contenders.push_back(
      make_muon("pacer::Muon, normalize_rows", gradients, pacer::MuonOptions(1e-3).normalize_rows(true)));
  contenders.push_back(make_adamw(gradients));

  constexpr double kSeconds = 60;
  const auto times = measure(contenders, device, {rounds, std::min<int64_t>(rounds, 3), kSeconds});
  std::vector<Measured> all;
  for (size_t i = 0; i < contenders.size(); ++i) all.push_back({contenders[i], times[i]});

  const auto millions = [](const Shapes& shapes) { return static_cast<double>(elements_of(shapes)) * 1e-6; };
  std::printf("%s, %s: %zu hidden matrices of %.2f M parameters, %zu other tensors of %.2f M\n",
              model.name.c_str(), given["dtype"].as<std::string>().c_str(), model.hidden.size(),
              millions(model.hidden), model.rest.size(), millions(model.rest));
  std::printf("%s, LibTorch %s, medians of %lld rounds\n\n",
              on_gpu ? gpu.c_str() : format("CPU, %d threads", at::get_num_threads()).c_str(), TORCH_VERSION,
              static_cast<long long>(times[0].whole.count));
  print_table(all, operations_of(model, kIterations), on_gpu);
  return 0;
}

}  // namespace

Subcommand subcommand() {
  Subcommand muon{"muon", "a step of Muon beside its matrix products and a step of AdamW", kAbout, run};
  muon.options.add_options()  //
      ("model", word("gpt|gpt2|tiny|auto")->default_value("auto"),
       "whose parameters; gpt: that of sharding, 24 layers of width 2048; auto: gpt on a GPU, tiny on a "
       "CPU")                                                                             //
      ("dtype", word("bf16|fp32")->default_value("bf16"), "of parameters and gradients")  //
      ("device", word("cpu|cuda|auto")->default_value("auto"),
       "auto: the GPU where there is one, else the CPU")  //
      ("rounds", whole_number(25),
       "in which each takes its turn; fewer, but three, where they take more than a minute")  //
      ("at-once", whole_number(int64_t{1} << 26),
       "elements at most in a batch of the products alone, unless one matrix has more; the default is "
       "Muon's");
  return muon;
}

}  // namespace bench::muon
