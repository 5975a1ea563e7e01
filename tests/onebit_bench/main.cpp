// pacer-onebit-bench: what a step of the 1-bit optimizers costs on GPUs, gradients in place and no backward
// to hide behind, and where the time goes. One process of a job (tests/overlap_bench/run.py --no-peer starts
// them). Peers in the same run: one all-reduce of all gradients in fp32 or bf16, then LibTorch's fused AdamW
// or FusedLamb. Each figure is the slowest rank's, the median over rounds.
//
//   pacer-onebit-bench MODEL [STEPS] [ROUNDS]      MODEL: gpt2, bert-large
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/accumulate.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "bench/shapes.h"
#include "bench/slowest.h"
#include "kernels.h"
#include "support/nearest_name.h"

namespace {

using bench::slowest;
using torch::Tensor;
using World = std::shared_ptr<pacer::Communicator>;

void print(pacer::Communicator& world, const std::string& what, double milliseconds,
           const std::string& note = "") {
  if (world.rank() == 0) std::printf("| %s | %.3f | %s |\n", what.c_str(), milliseconds, note.c_str());
}

std::string format(const char* text, double value) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, text, value);
  return buffer;
}

// Parameters, the same on all ranks, and gradients of this one, as pieces of one buffer each, so that one
// all-reduce takes all gradients.
struct Flat {
  Flat(const bench::ModelShapes& model, const pacer::Communicator& world) {
    int64_t total = 0;
    for (const int64_t count : model.counts()) total += (count + 127) / 128 * 128;
    torch::manual_seed(0);
    values = torch::randn({total}, at::TensorOptions().device(world.device()));
    torch::manual_seed(1 + static_cast<uint64_t>(world.rank()));
    gradients = torch::randn({total}, values.options()) * 1e-3;
    int64_t offset = 0;
    for (const auto& shape : model.shapes) {  // which say what is compressed: vectors are not
      const int64_t count = c10::multiply_integers(shape);
      parameters.push_back(values.narrow(0, offset, count).view(shape).detach().requires_grad_());
      parameters.back().mutable_grad() = gradients.narrow(0, offset, count).view(shape);
      offset += (count + 127) / 128 * 128;
    }
  }
  Tensor values, gradients;
  std::vector<Tensor> parameters;
};

std::function<void()> fused_adamw(const Flat& flat) {
  auto lists =
      std::make_shared<std::vector<std::vector<Tensor>>>(5);  // parameters, gradients, moments, steps
  for (const Tensor& parameter : flat.parameters) {
    (*lists)[0].push_back(parameter.detach());
    (*lists)[1].push_back(parameter.grad());
    (*lists)[2].push_back(at::zeros_like(parameter.detach()));
    (*lists)[3].push_back(at::zeros_like(parameter.detach()));
    (*lists)[4].push_back(torch::ones({}, flat.values.options()));
  }
  return [lists] {
    const torch::NoGradGuard no_grad;
    auto& l = *lists;
    at::_fused_adamw_(l[0], l[1], l[2], l[3], {}, l[4], /*lr=*/1e-5, 0.9, 0.999, 0.01, 1e-8, false, false);
  };
}

std::function<void()> fused_lamb(const Flat& flat) {
  const auto optimizer = std::make_shared<pacer::FusedLamb>(flat.parameters, pacer::FusedLambOptions(1e-5));
  return [optimizer] { optimizer->step(); };
}

using Rule = std::function<void()> (*)(const Flat& flat);

double averaged(const World& world, const bench::ModelShapes& model, bool bf16, Rule rule, int rounds,
                int steps) {
  const Flat flat(model, *world);
  const auto step = rule(flat);
  const auto agreed = pacer::CollectiveOptions().agreed(true);
  const Tensor wire = bf16 ? flat.gradients.to(at::kBFloat16) : flat.gradients;
  return slowest(*world, rounds, steps, [&] {
    if (bf16) wire.copy_(flat.gradients);
    world->all_reduce(wire, agreed).wait();
    if (bf16) flat.gradients.copy_(wire);
    step();
  });
}

template <class Optimizer, class Options>
double compressed(const World& world, const bench::ModelShapes& model, bool block_scales, int rounds,
                  int steps) {
  const Flat flat(model, *world);
  const auto options =
      Options(1e-5).betas({0.9, 0.5}).freeze_step(2).compress_alone(true).block_scales(block_scales);
  Optimizer optimizer(flat.parameters, options, world);
  for (int i = 0; i < 4; ++i) optimizer.step();
  return slowest(*world, rounds, steps, [&] { optimizer.step(); });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "gpt2";
  pacer::require(name == "gpt2" || name == "bert-large", "there is no model '", name, "'; ",
                 examples::suggestion(name, {"gpt2", "bert-large"}));
  const int steps = argc > 2 ? std::atoi(argv[2]) : 20, rounds = argc > 3 ? std::atoi(argv[3]) : 7;
  const World world = pacer::Communicator::from_environment();
  pacer::require<pacer::Unavailable>(world->device().is_cuda(),
                                     "pacer-onebit-bench needs a GPU for each rank");
  const bench::ModelShapes model = name == "bert-large" ? bench::bert_large() : bench::gpt2();
  const std::vector<int64_t> counts = model.counts();
  if (world->rank() == 0) {
    std::printf(
        "\n%s, %.1f M parameters, %zu tensors, %d ranks over %s\n\n| | ms | |\n| --- | ---: | --- |\n",
        model.title.c_str(), static_cast<double>(model.parameters()) * 1e-6, counts.size(),
        world->world_size(), world->backend_name().c_str());
  }
  print(*world, "fp32 all-reduce + LibTorch's fused AdamW",
        averaged(world, model, false, fused_adamw, rounds, steps));
  print(*world, "bf16 all-reduce + LibTorch's fused AdamW",
        averaged(world, model, true, fused_adamw, rounds, steps));
  print(*world, "fp32 all-reduce + FusedLamb", averaged(world, model, false, fused_lamb, rounds, steps));
  print(*world, "bf16 all-reduce + FusedLamb", averaged(world, model, true, fused_lamb, rounds, steps));
  double bandwidth = 0;
  for (const bool blocks : {true, false}) {
    const std::string scales = blocks ? ", a scale for each block" : ", one scale";
    print(*world, "OneBitAdam" + scales,
          compressed<pacer::OneBitAdam, pacer::OneBitAdamOptions>(world, model, blocks, rounds, steps));
    print(*world, "OneBitLamb" + scales,
          compressed<pacer::OneBitLamb, pacer::OneBitLambOptions>(world, model, blocks, rounds, steps));
    const onebit_bench::Kernels kernels(counts, blocks, *world);
    if (blocks) {
      const double copy = slowest(*world, rounds, steps, [&] { kernels.copy(); });
      bandwidth = kernels.copied_bytes() / copy;
      print(*world, "copy", copy, format("%.2f TB/s", bandwidth * 1e-9));
    }
    std::vector<onebit_bench::Part> parts = kernels.adam();
    for (const onebit_bench::Part& part : kernels.lamb()) parts.push_back(part);
    for (const auto& [what, bytes, run] : parts) {
      const double time = slowest(*world, rounds, steps, run);
      print(*world, what + scales, time,
            bytes > 0 ? format("%.3f of copy bandwidth", bytes / time / bandwidth) : std::string());
    }
  }
}
