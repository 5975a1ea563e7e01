// What the head of a language model and its loss cost, forward and backward, in time and memory.
#include <cstdint>
#include <functional>
#include <string>

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <torch/types.h>

#include <pacer/core/error.h>
#include <pacer/modules/linear_cross_entropy.h>

#include "subcommands.h"
#include "support/device.h"
#include "support/gpu_time.h"
#include "support/table.h"

namespace bench::loss {
namespace {

constexpr const char* kAbout =
    R"(Measures linear_cross_entropy, forward and backward, beside a linear layer with cross entropy of fp32 logits,
in bf16 on the GPU. benchmarks/loss/peer.py has PyTorch's chunked form and Liger's. Prints a JSON line for
each: the median of 10, and the memory that it took beyond inputs and gradients, as a share of the bf16 logits.

  pacer-bench loss [--rows N] [--hidden N] [--vocabulary N] [--chunk N]
)";

using Options = pacer::modules::LinearCrossEntropyOptions;

struct Shape {
  int64_t rows, hidden, vocabulary;
};

void measure(const std::string& name, const Shape& shape,
             const std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>& loss) {
  const at::Device gpu(at::kCUDA, 0);
  const auto options = at::TensorOptions(gpu).dtype(at::kBFloat16);
  const at::Tensor hidden = at::randn({shape.rows, shape.hidden}, options).requires_grad_();
  const at::Tensor weight = (at::randn({shape.vocabulary, shape.hidden}, options) * 0.02).requires_grad_();
  const at::Tensor targets = at::randint(shape.vocabulary, {shape.rows}, options.dtype(at::kLong));
  const auto pass = [&] { loss(hidden, weight, targets).backward(); };
  pass();  // gradients are there, and are added to from now on
  const double of_weights = static_cast<double>(weight.numel()) * 2e-9;  // a gradient before it is added
  start_memory_peaks(gpu);
  const double before = memory_peaks(gpu).allocated;
  pass();
  const double taken = memory_peaks(gpu).allocated - before;
  const Spread time = time_enqueued(pass, 5, {10, 5, 20});
  const double logits = static_cast<double>(shape.rows * shape.vocabulary) * 2e-9;
  print(pacer::JsonLine()
            .add("form", name)
            .add("ms", rounded(time.median, 2))
            .add("GB_taken", rounded(taken, 3))
            .add("beyond_gradient_of_logits", rounded((taken - of_weights) / logits, 3)));
}

int run(const examples::OptionValues& given) {
  pacer::require<pacer::Unavailable>(!gpu_name().empty(),
                                     "the figures are of an NVIDIA GPU, and this machine or build has none");
  const Shape shape{number_in(given, "rows"), number_in(given, "hidden"), number_in(given, "vocabulary")};
  print(pacer::JsonLine()
            .add("gpu", gpu_name())
            .add("rows", shape.rows)
            .add("hidden", shape.hidden)
            .add("vocabulary", shape.vocabulary));
  Options options;
  if (given.count("chunk") != 0) options.chunk_bytes(number_in(given, "chunk") << 20);
  measure("linear_cross_entropy", shape,
          [&](const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets) {
            return pacer::modules::linear_cross_entropy(hidden, weight, targets, options);
          });
  measure("linear_cross_entropy in 8 bits", shape,
          [&](const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets) {
            return pacer::modules::linear_cross_entropy(hidden, weight, targets, Options(options).fp8(true));
          });
  measure("linear and cross entropy", shape,
          [](const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets) {
            return at::cross_entropy_loss(at::linear(hidden, weight).to(at::kFloat), targets);
          });
  return 0;
}

}  // namespace

Subcommand subcommand() {
  Subcommand loss{"loss", "the head of a language model and its loss, without the logits", kAbout, run};
  loss.options.add_options()                                     //
      ("rows", whole_number(8192), "tokens")                     //
      ("hidden", whole_number(4096), "width of the model")       //
      ("vocabulary", whole_number(131'072), "rows of the head")  //
      ("chunk", whole_number(), "MiB of logits at once; by default 1,536 rows");
  return loss;
}

}  // namespace bench::loss
