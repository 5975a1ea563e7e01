// What a step of the 1-bit optimizers costs on GPUs, and where the time goes.
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/randn.h>
#include <c10/util/accumulate.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "kernels.h"
#include "subcommands.h"
#include "support/fused_adamw.h"
#include "support/ranks.h"
#include "support/shapes.h"
#include "support/table.h"

namespace bench::onebit {
namespace {

constexpr const char* kAbout =
    R"(Measures what a step of the 1-bit optimizers costs on GPUs, gradients in place and no backward to
hide behind, and where the time goes. One process of a job: benchmarks/run.py --no-peer starts them.
Peers in the same run: one all-reduce of all gradients in fp32 or bf16, then LibTorch's fused AdamW
or FusedLamb. Each figure is the slowest rank's, the median over rounds.

  pacer-bench onebit MODEL [STEPS] [ROUNDS]
)";

using torch::Tensor;

void print(pacer::Communicator& world, const std::string& what, double milliseconds,
           const std::string& note = "") {
  if (world.rank() == 0) print_row({what, format("%.3f", milliseconds), note});
}

// Parameters, the same on all ranks, and gradients of this one, as pieces of one buffer each, so that one
// all-reduce takes all gradients.
struct Flat {
  Flat(const ModelShapes& model, const pacer::Communicator& world) {
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
  std::vector<Tensor> parameters, gradients;
  for (const Tensor& parameter : flat.parameters) {
    parameters.push_back(parameter.detach());
    gradients.push_back(parameter.grad());
  }
  const auto state = std::make_shared<FusedAdamWState>(parameters, AdamWSettings{/*lr=*/1e-5});
  state->count();  // once
  return [state, gradients] {
    const torch::NoGradGuard no_grad;
    state->update(gradients);
  };
}

std::function<void()> fused_lamb(const Flat& flat) {
  const auto optimizer = std::make_shared<pacer::FusedLamb>(flat.parameters, pacer::FusedLambOptions(1e-5));
  return [optimizer] { optimizer->step(); };
}

using Rule = std::function<void()> (*)(const Flat& flat);

double averaged(const World& world, const ModelShapes& model, bool bf16, Rule rule, int64_t rounds,
                int64_t steps) {
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
double compressed(const World& world, const ModelShapes& model, bool block_scales, int64_t rounds,
                  int64_t steps) {
  const Flat flat(model, *world);
  const auto options =
      Options(1e-5).betas({0.9, 0.5}).freeze_step(2).compress_alone(true).block_scales(block_scales);
  Optimizer optimizer(flat.parameters, options, world);
  for (int i = 0; i < 4; ++i) optimizer.step();
  return slowest(*world, rounds, steps, [&] { optimizer.step(); });
}

int run(const examples::OptionValues& given) {
  const auto model =
      examples::choice_of<ModelShapes>(given, "model", {{"gpt2", gpt2()}, {"bert-large", bert_large()}});
  const int64_t steps = number_in(given, "steps"), rounds = number_in(given, "rounds");
  const World world = pacer::Communicator::from_environment();
  pacer::require<pacer::Unavailable>(world->device().is_cuda(), "it needs a GPU for each rank");
  const std::vector<int64_t> counts = model.counts();
  if (world->rank() == 0) {
    std::printf("\n%s, %.1f M parameters, %zu tensors, %d ranks over %s\n\n", model.title.c_str(),
                static_cast<double>(model.parameters()) * 1e-6, counts.size(), world->world_size(),
                world->backend_name().c_str());
    print_head({"", "ms:", ""});
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
    const Kernels kernels(counts, blocks, *world);
    if (blocks) {
      const double copy = slowest(*world, rounds, steps, [&] { kernels.copy(); });
      bandwidth = kernels.copied_bytes() / copy;
      print(*world, "copy", copy, format("%.2f TB/s", bandwidth * 1e-9));
    }
    for (const auto& [what, bytes, run] : kernels.parts()) {
      const double time = slowest(*world, rounds, steps, run);
      print(*world, what + scales, time,
            bytes > 0 ? format("%.3f of copy bandwidth", bytes / time / bandwidth) : std::string());
    }
  }
  return 0;
}

}  // namespace

Subcommand subcommand() {
  Subcommand onebit{"onebit", "a step of the 1-bit optimizers on GPUs, and each kernel of it alone", kAbout,
                    run};
  onebit.options.add_options()  //
      ("model", word("gpt2|bert-large")->default_value("gpt2"),
       "whose shapes the parameters have")       //
      ("steps", whole_number(20), "of a round")  //
      ("rounds", whole_number(7), "whose median counts");
  onebit.without_dashes = "model,steps,rounds";
  return onebit;
}

}  // namespace bench::onebit
