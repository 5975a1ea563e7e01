// One transformer layer, forward and backward, in six ways: LibTorch's modules with attention written out and
// with its one function for it, pacer::modules::TransformerLayer in 16 bits and in 8-bit floats with delayed
// and with current scaling, and what cannot be saved: the layer's twelve products on 8-bit inputs and its
// attention, each alone. What to look at: the times, and what eight bits cost in accuracy.
//
// On a GPU the shape is that of the published comparison of fused layers: hidden 4096, 32 heads, ffn 16384,
// four sequences of 2048. On a CPU, where 8 bits are computed slowly and for tests only, it is a small one.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/cuda.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "plain_layer.h"
#include "support/program.h"

namespace {

using torch::Tensor;

constexpr Shape kLarge = {4096, 32, 16384, 4, 2048}, kSmall = {64, 2, 256, 2, 32};
constexpr auto kType = torch::kBFloat16;

// On a CPU a time is no result.
int uncounted(bool on_gpu) { return on_gpu ? 5 : 1; }
int counted(bool on_gpu) { return on_gpu ? 25 : 3; }

// The median of several times.
double milliseconds(bool on_gpu, const std::function<void()>& f) {
  std::vector<double> times;
  for (int i = 0; i < uncounted(on_gpu) + counted(on_gpu); ++i) {
    if (on_gpu) torch::cuda::synchronize();
    const auto start = std::chrono::steady_clock::now();
    f();
    if (on_gpu) torch::cuda::synchronize();
    const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
    if (i >= uncounted(on_gpu)) times.push_back(elapsed.count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// A way to compute the layer: forward, and what ends a step.
struct Way {
  const char* name;
  std::shared_ptr<torch::nn::Module> module;
  std::function<Tensor(const Tensor&)> forward;
  std::function<void()> end_step;
};

void run_once(const Way& way, const Tensor& x, const Tensor& dy) {
  way.module->zero_grad();
  x.mutable_grad() = Tensor();
  way.forward(x).backward(dy);
  way.end_step();
}

void copy_parameters(const torch::nn::Module& from, torch::nn::Module& to) {
  const torch::NoGradGuard no_grad;
  const auto values = from.named_parameters();
  for (auto& item : to.named_parameters()) item.value().copy_(values[item.key()]);
}
void copy_parameters(const PlainLayer& from, pacer::modules::TransformerLayer& to) {
  const torch::NoGradGuard no_grad;
  const auto copy = [](const auto& source, auto& target) {
    target->weight.copy_(source->weight);
    target->bias.copy_(source->bias);
  };
  copy(from->norm1, to->qkv->norm);
  copy(from->qkv, to->qkv->linear);
  copy(from->projection, to->projection);
  copy(from->norm2, to->mlp->norm);
  copy(from->fc1, to->mlp->fc1);
  copy(from->fc2, to->mlp->fc2);
}

Way plain_way(const char* name, const PlainLayer& layer) {
  return {name, layer.ptr(), [module = layer.ptr()](const Tensor& x) { return module->forward(x); }, [] {}};
}

Way fused_way(const char* name, const pacer::modules::TransformerLayer& layer,
              const std::shared_ptr<pacer::Fp8Scaling>& scaling) {
  const auto forward = [module = layer.ptr(), scaling](const Tensor& x) {
    const pacer::Fp8Scope scope(scaling);
    return module->forward(x);
  };
  return {name, layer.ptr(), forward, [scaling] {
            if (scaling) scaling->update();
          }};
}

// All with the same weights.
std::vector<Way> all_ways(const Shape& shape, const Task& task, at::Device device) {
  torch::manual_seed(1);
  PlainLayer written_out(shape, task, true), plain(shape, task, false);
  written_out->to(device, kType);
  plain->to(device, kType);
  pacer::modules::TransformerLayer fused(pacer::modules::TransformerLayerOptions(shape.hidden, shape.heads)
                                             .ffn(shape.ffn)
                                             .causal(task.is_causal)
                                             .attention_dropout(task.dropout)
                                             .projection_dropout(task.dropout));
  fused->to(device, kType);
  copy_parameters(*written_out, *plain);
  copy_parameters(written_out, fused);
  const auto scaling = [&](pacer::Fp8Recipe recipe) {
    return std::make_shared<pacer::Fp8Scaling>(*fused, pacer::Fp8Options().recipe(recipe));
  };
  return {plain_way("LibTorch, attention written out", written_out),
          plain_way("LibTorch, its attention function", plain),
          fused_way("TransformerLayer, bf16", fused, nullptr),
          fused_way("TransformerLayer, FP8, delayed", fused, scaling(pacer::Fp8Recipe::delayed)),
          fused_way("TransformerLayer, FP8, current", fused, scaling(pacer::Fp8Recipe::current))};
}

// a [m, k] times b [n, k] transposed, in 8-bit floats with scales of one.
struct Product {
  Tensor a, b, one;
  bool is_forward;
  Product(int64_t m, int64_t n, int64_t k, at::ScalarType of_a, at::Device device)
      : a(torch::randn({m, k}, device).to(of_a)),
        b(torch::randn({n, k}, device).to(torch::kFloat8_e4m3fn)),
        one(torch::ones({1}, device)),
        is_forward(of_a == torch::kFloat8_e4m3fn) {}
  void run() const { at::_scaled_mm(a, b.t(), one, one, {}, {}, kType, /*use_fast_accum=*/is_forward); }
};

// Twelve products and attention, forward and backward, each alone.
double limit(const Shape& shape, const Task& task, at::Device device, bool on_gpu) {
  const int64_t rows = shape.batch * shape.sequence, h = shape.hidden, f = shape.ffn;
  const std::pair<int64_t, int64_t> layers[] = {{h, 3 * h}, {h, h}, {h, f}, {f, h}};
  double total = 0;
  for (const auto& [in, out] : layers) {
    for (const Product& product : {Product(rows, out, in, torch::kFloat8_e4m3fn, device),
                                   Product(rows, in, out, torch::kFloat8_e5m2, device),
                                   Product(out, in, rows, torch::kFloat8_e5m2, device)}) {
      total += milliseconds(on_gpu, [&] { product.run(); });
    }
  }
  std::vector<Tensor> qkv;
  for (int i = 0; i < 3; ++i) {
    const Tensor part = torch::randn({shape.batch, shape.sequence, shape.heads, h / shape.heads}, device);
    qkv.push_back(part.to(kType).transpose(1, 2).detach().requires_grad_());
  }
  const Tensor dy = torch::randn_like(qkv[0]);
  return total + milliseconds(on_gpu, [&] {
           for (Tensor& part : qkv) part.mutable_grad() = Tensor();
           at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, task.dropout, task.is_causal)
               .backward(dy);
         });
}

double relative_error(const Tensor& found, const Tensor& exact) {
  return ((found.to(torch::kFloat) - exact).norm() / exact.norm()).item<double>();
}

// Root mean square errors of the layer's result without x, and of the gradient of x without that of the
// result, beside fp32: what the layer itself computes.
void print_errors(const Shape& shape, const Task& task, at::Device device) {
  const auto ways = all_ways(shape, task, device);
  PlainLayer in_fp32(shape, task, false);
  in_fp32->to(device);
  copy_parameters(*ways[1].module, *in_fp32);
  const Tensor x = torch::randn({1, std::min<int64_t>(shape.sequence, 256), shape.hidden}, device).to(kType);
  const Tensor dy = torch::randn_like(x);
  const auto pass = [&](const std::function<Tensor(const Tensor&)>& forward, at::ScalarType type) {
    const Tensor in = x.to(type).detach().requires_grad_();
    const Tensor y = forward(in);
    y.backward(dy.to(type));
    return std::make_pair(y.detach().to(torch::kFloat) - x.to(torch::kFloat),
                          in.grad().to(torch::kFloat) - dy.to(torch::kFloat));
  };
  const auto exact = pass([&](const Tensor& in) { return in_fp32(in); }, torch::kFloat);
  std::printf("\n%-34s %12s %12s\n", "error beside fp32, without dropout", "result", "gradient");
  for (const Way& way : ways) {
    const auto found = pass(way.forward, kType);
    std::printf("%-34s %12.4f %12.4f\n", way.name, relative_error(found.first, exact.first),
                relative_error(found.second, exact.second));
  }
}

void run() {
  const bool on_gpu = torch::cuda::is_available();
  const at::Device device = on_gpu ? at::Device(torch::kCUDA, 0) : at::Device(torch::kCPU);
  const Shape shape = on_gpu ? kLarge : kSmall;
  std::printf(
      "hidden %ld, %ld heads, ffn %ld, %ld sequences of %ld; forward and backward, ms, median of %d\n",
      shape.hidden, shape.heads, shape.ffn, shape.batch, shape.sequence, counted(on_gpu));
  for (const Task& task : {Task{0.1, false}, Task{0, false}, Task{0, true}}) {
    std::printf("\ndropout %.1f, %s\n", task.dropout, task.is_causal ? "causal" : "all to all");
    const auto options = torch::TensorOptions(device).dtype(kType);
    const Tensor x = torch::randn({shape.batch, shape.sequence, shape.hidden}, options).requires_grad_();
    const Tensor dy = torch::randn_like(x);
    double first = 0;
    for (const Way& way : all_ways(shape, task, device)) {
      const double time = milliseconds(on_gpu, [&] { run_once(way, x, dy); });
      if (first == 0) first = time;
      std::printf("%-34s %8.2f   %.2f of the first\n", way.name, time, time / first);
    }
    const double least = limit(shape, task, device, on_gpu);
    std::printf("%-34s %8.2f   %.2f\n", "products and attention alone", least, least / first);
  }
  print_errors(shape, {0, false}, device);
}

}  // namespace

int main(int argument_count, char** arguments) {
  constexpr const char* kAbout =
      "Times a transformer layer of LibTorch's modules beside pacer::modules::TransformerLayer, in 16 bits "
      "and in\n"
      "8-bit floats, on a GPU at the size of a published comparison, on a CPU at a small one.\n";
  return examples::run_program(argument_count, arguments, kAbout, run);
}
