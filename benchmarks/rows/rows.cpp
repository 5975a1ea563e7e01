// What a step costs that changes some of the rows alone.
#include <cstdint>
#include <vector>

#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/optimizers/fused_adam.h>

#include "subcommands.h"
#include "support/gpu_time.h"
#include "support/passes.h"
#include "support/table.h"

namespace bench::rows {
namespace {

constexpr const char* kAbout =
    R"(Measures a step of FusedAdam that changes some of the rows alone (set_visible_rows), beside one of all
rows in the same run. The parameters are one table of 59 numbers a row, then those of a splat, which has
them apart: places 3, scales 3, turns 4, opacity 1, colours 3 and 45. On the GPU, or on the CPU where there is none (or with --cpu). Prints a JSON line
for each share of visible rows, which are drawn at random: the median of 25.

  pacer-bench rows [--cpu] [ROWS]
)";

void measure(int64_t rows, const std::vector<int64_t>& widths, at::Device device) {
  const auto options = at::TensorOptions().device(device);
  std::vector<at::Tensor> parameters;
  for (const int64_t width : widths) {
    parameters.push_back(at::randn({rows, width}, options).requires_grad_());
    parameters.back().mutable_grad() = at::randn({rows, width}, options);
  }
  pacer::FusedAdam optimizer(parameters, pacer::FusedAdamOptions(1e-4));
  print(pacer::JsonLine()
            .add("kind", "environment")
            .add("device", device.is_cuda() ? gpu_name() : std::string("CPU"))
            .add("rows", rows)
            .add("tensors", static_cast<int64_t>(widths.size())));
  const double all = time_pass(device, [&] { optimizer.step(); }).median;
  print(pacer::JsonLine().add("kind", "result").add("visible", "all, no mask").add("ms", all));
  for (const double share : {1.0, 0.5, 0.1, 0.01, 0.0}) {
    const at::Tensor visible = at::rand({rows}, options).lt(share);
    optimizer.set_visible_rows(parameters, visible);
    const Spread time = time_pass(device, [&] { optimizer.step(); });
    print(pacer::JsonLine()
              .add("kind", "result")
              .add("visible", share)
              .add("ms", time.median)
              .add("ms_min", time.min)
              .add("ms_max", time.max)
              .add("of_all", time.median / all));
  }
}

int run(const examples::OptionValues& given) {
  const bool on_gpu = given.count("cpu") == 0 && !gpu_name().empty();
  const std::vector<std::vector<int64_t>> all{{59}, {3, 3, 4, 1, 3, 45}};
  for (const auto& widths : all) {
    measure(number_in(given, "rows"), widths, on_gpu ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU));
  }
  return 0;
}

}  // namespace

Subcommand subcommand() {
  Subcommand rows{"rows", "a step that changes some of the rows alone", kAbout, run};
  rows.options.add_options()                            //
      ("cpu", "on the CPU, even where there is a GPU")  //
      ("rows", whole_number(3'000'000), "of each parameter");
  rows.without_dashes = "rows";
  return rows;
}

}  // namespace bench::rows
