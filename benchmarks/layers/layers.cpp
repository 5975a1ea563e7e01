// What the passes between the products of a transformer layer cost, as a fraction of the bandwidth of a copy.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <torch/types.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>
#include <pacer/kernels/layer_norm.h>
#include <pacer/kernels/rotary.h>

#include "subcommands.h"
#include "support/gpu_time.h"
#include "support/passes.h"
#include "support/table.h"

namespace bench::layers {
namespace {

constexpr const char* kAbout =
    R"(Measures the norms of a transformer layer and the turning of its queries and keys by their
positions, in bf16, as a fraction of the bandwidth of a copy that is measured in the same run. On the
GPU, or on one thread of the CPU where there is none (or with --cpu). Prints a JSON line for each
kernel, the median of 25. Bytes are those of the rule, each matrix read or written once; several
sets of matrices take turns, so that none is in the cache when it is read. fraction_of_equal_copy is
beside a copy that moves as many bytes, which begins and ends with few blocks at work, as the passes do.

  pacer-bench layers [--cpu] [--rows N] [--hidden N] [--heads N] [--kv-heads N] [--head-dim N]
)";

using namespace pacer::kernels;
using at::Tensor;
using pacer::Normalization;

constexpr double kBytes = 2;  // of an element

struct Shape {
  int64_t rows, hidden, heads, kv_heads, head_dim;
};

// One layer's matrices.
class Layer {
 public:
  Layer(const Shape& shape, at::Device device) : shape_(shape), device_(device) {
    const auto floats = at::TensorOptions().device(device).dtype(at::kFloat);
    const auto random = [&](int64_t columns) {
      return at::randn({shape.rows, columns}, floats).to(at::kBFloat16);
    };
    x_ = random(shape.hidden), branch_ = random(shape.hidden), dy_ = random(shape.hidden);
    sum_ = at::empty_like(x_), y_ = at::empty_like(x_);
    weight_ = at::ones({shape.hidden}, floats), bias_ = at::ones({shape.hidden}, floats);
    mean_ = at::empty({shape.rows}, floats), rstd_ = at::empty({shape.rows}, floats);
    partials_ = at::empty({2, layer_norm_parts(shape.rows, shape.hidden), shape.hidden}, floats);
    of_weight_ = at::empty({shape.hidden}, floats), of_bias_ = at::empty({shape.hidden}, floats);
    q_width_ = shape.heads * shape.head_dim, kv_width_ = shape.kv_heads * shape.head_dim;
    qkv_ = random(q_width_ + 2 * kv_width_), dqkv_ = at::empty_like(qkv_);
    dq_ = random(q_width_), dk_ = random(kv_width_), dv_ = random(kv_width_);
    qk_ = random(q_width_ + kv_width_);
    const Tensor angles = at::rand({shape.rows, shape.head_dim / 2}, floats) * 6.3;
    cosines_ = angles.cos(), sines_ = angles.sin();
    head_weight_ = at::ones({shape.head_dim}, floats);
    of_heads_ = at::empty({2, shape.head_dim}, floats);
    of_head_parts_ = at::empty({2, rotary_parts(shape.rows), shape.head_dim}, floats);
  }

  double elements() const { return static_cast<double>(x_.numel()); }
  double of_q_and_k() const { return static_cast<double>(qk_.numel()); }
  double of_qkv() const { return static_cast<double>(qkv_.numel()); }

  void norm(Normalization normalization, bool has_branch) const {
    LayerNormForward work;
    work.normalization = normalization;
    work.stream = work.branch_type = ElementType::bf16;
    work.rows = shape_.rows, work.columns = shape_.hidden;
    work.x = x_.const_data_ptr();
    if (has_branch) work.branch = branch_.const_data_ptr(), work.sum = sum_.mutable_data_ptr();
    work.weight = weight_.const_data_ptr();
    work.y = y_.mutable_data_ptr();
    work.rstd = rstd_.mutable_data_ptr<float>();
    if (normalization == Normalization::layer) {
      work.bias = bias_.const_data_ptr();
      work.mean = mean_.mutable_data_ptr<float>();
    }
    if (device_.is_cuda()) return layer_norm_cuda(work, stream());
    layer_norm_cpu(work, 0, work.rows);
  }

  // Adds the gradient that reaches the residual stream elsewhere.
  void norm_backward(Normalization normalization) const {
    LayerNormBackward work;
    work.normalization = normalization;
    work.stream = work.gradient_type = ElementType::bf16;
    work.rows = shape_.rows, work.columns = shape_.hidden;
    work.dy = dy_.const_data_ptr(), work.s = x_.const_data_ptr(), work.dsum = branch_.const_data_ptr();
    work.mean = mean_.const_data_ptr<float>(), work.rstd = rstd_.const_data_ptr<float>();
    work.weight = weight_.const_data_ptr();
    work.dx = sum_.mutable_data_ptr();
    work.partials = partials_.mutable_data_ptr<float>();
    work.dweight = of_weight_.mutable_data_ptr<float>();
    if (normalization == Normalization::layer) work.dbias = of_bias_.mutable_data_ptr<float>();
    if (device_.is_cuda()) return layer_norm_backward_cuda(work, stream());
    layer_norm_backward_cpu(work, 0, layer_norm_parts(work.rows, work.columns));
    layer_norm_parameters_cpu(work, 0, work.columns);
  }

  // In place without norms of heads, elsewhere with them.
  void turn(bool has_norms) const {
    RotaryForward work;
    describe(work, has_norms);
    const Tensor& to = has_norms ? qk_ : qkv_;
    work.q.from = at(qkv_, 0), work.k.from = at(qkv_, q_width_);
    work.q.to = at(to, 0), work.k.to = at(to, q_width_);
    work.q.from_stride = work.k.from_stride = qkv_.size(1);
    work.q.to_stride = work.k.to_stride = to.size(1);
    if (device_.is_cuda()) return rotary_cuda(work, stream());
    rotary_cpu(work, 0, work.rows);
  }

  void turn_back(bool has_norms) const {
    RotaryBackward work;
    describe(work, has_norms);
    work.v.heads = shape_.kv_heads;
    work.q.from = at(dq_, 0), work.k.from = at(dk_, 0), work.v.from = at(dv_, 0);
    work.q.from_stride = q_width_, work.k.from_stride = work.v.from_stride = kv_width_;
    work.q.to = at(dqkv_, 0), work.k.to = at(dqkv_, q_width_), work.v.to = at(dqkv_, q_width_ + kv_width_);
    work.q.to_stride = work.k.to_stride = work.v.to_stride = dqkv_.size(1);
    if (has_norms) {
      work.q_read = at(qkv_, 0), work.k_read = at(qkv_, q_width_);
      work.q_read_stride = work.k_read_stride = qkv_.size(1);
      work.partials = of_head_parts_.mutable_data_ptr<float>();
      work.dq_weight = of_heads_.mutable_data_ptr<float>();
      work.dk_weight = work.dq_weight + shape_.head_dim;
    }
    if (device_.is_cuda()) return rotary_backward_cuda(work, stream());
    rotary_backward_cpu(work, 0, rotary_parts(work.rows));
    if (has_norms) rotary_weights_cpu(work);
  }

 private:
  Stream stream() const { return pacer::detail::current_stream(device_); }
  static void* at(const Tensor& matrix, int64_t column) {
    return static_cast<char*>(matrix.mutable_data_ptr()) + column * matrix.element_size();
  }
  void describe(RotaryForward& work, bool has_norms) const {
    work.type = ElementType::bf16;
    work.rows = work.sequence = shape_.rows;
    work.head_dim = shape_.head_dim;
    work.cosines = cosines_.const_data_ptr<float>(), work.sines = sines_.const_data_ptr<float>();
    work.q.heads = shape_.heads, work.k.heads = shape_.kv_heads;
    if (has_norms) work.q.weight = work.k.weight = head_weight_.const_data_ptr();
  }

  Shape shape_;
  at::Device device_;
  int64_t q_width_ = 0, kv_width_ = 0;
  Tensor x_, branch_, dy_, sum_, y_, weight_, bias_, mean_, rstd_, partials_, of_weight_, of_bias_;
  Tensor qkv_, dqkv_, dq_, dk_, dv_, qk_, cosines_, sines_, head_weight_, of_heads_, of_head_parts_;
};

void measure(const Shape& shape, at::Device device) {
  const double copy = copy_bandwidth(device, int64_t{1} << 26);
  print(pacer::JsonLine()
            .add("kind", "environment")
            .add("device", device.is_cuda() ? gpu_name() : std::string("one CPU thread"))
            .add("rows", shape.rows)
            .add("hidden", shape.hidden)
            .add("heads", shape.heads)
            .add("kv_heads", shape.kv_heads)
            .add("head_dim", shape.head_dim)
            .add("copy_gigabytes_per_second", copy / 1e9));
  std::vector<Layer> layers;
  for (int i = 0; i < (device.is_cuda() ? 4 : 1); ++i) layers.emplace_back(shape, device);
  const auto report = [&](const std::string& what, double elements_moved,
                          const std::function<void(const Layer&)>& work) {
    size_t turn = 0;
    const Spread time = time_pass(device, [&] { work(layers[turn++ % layers.size()]); });
    const double bytes = kBytes * elements_moved, speed = bytes / (time.median * 1e-3);
    print(pacer::JsonLine()
              .add("kind", "result")
              .add("kernel", what)
              .add("ms", time.median)
              .add("ms_min", time.min)
              .add("ms_max", time.max)
              .add("gigabytes_per_second", speed / 1e9)
              .add("fraction_of_copy", speed / copy)
              .add("fraction_of_equal_copy", speed / copy_bandwidth_of(device, bytes)));
  };
  const double of_x = layers[0].elements(), of_qk = layers[0].of_q_and_k(), of_qkv = layers[0].of_qkv();
  for (const Normalization normalization : {Normalization::layer, Normalization::rms}) {
    const std::string name = normalization == Normalization::rms ? "RMS norm" : "layer norm";
    report(name, 2 * of_x, [&](const Layer& layer) { layer.norm(normalization, false); });
    report(name + " behind a residual", 4 * of_x,
           [&](const Layer& layer) { layer.norm(normalization, true); });
    report(name + " backward", 4 * of_x, [&](const Layer& layer) { layer.norm_backward(normalization); });
  }
  report("rotary, in place", 2 * of_qk, [](const Layer& layer) { layer.turn(false); });
  report("rotary backward, side by side", 2 * of_qkv, [](const Layer& layer) { layer.turn_back(false); });
  report("norms of heads and rotary", 2 * of_qk, [](const Layer& layer) { layer.turn(true); });
  report("norms of heads and rotary backward", 2 * of_qkv + of_qk,
         [](const Layer& layer) { layer.turn_back(true); });
}

int run(const examples::OptionValues& given) {
  const bool on_gpu = given.count("cpu") == 0 && !gpu_name().empty();
  const auto number = [&](const char* name) { return number_in(given, name); };
  measure({number("rows"), number("hidden"), number("heads"), number("kv-heads"), number("head-dim")},
          on_gpu ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU));
  return 0;
}

}  // namespace

Subcommand subcommand() {
  Subcommand layers{"layers", "norms and rotary positions of a layer, beside a copy", kAbout, run};
  layers.options.add_options()                                         //
      ("cpu", "one thread of the CPU, also where there is a GPU")      //
      ("rows", whole_number(8192), "tokens: one sequence")             //
      ("hidden", whole_number(4096), "features, as of Llama 3's 8 B")  //
      ("heads", whole_number(32), "heads of queries")                  //
      ("kv-heads", whole_number(8), "heads of keys and of values")     //
      ("head-dim", whole_number(128), "channels of a head");
  return layers;
}

}  // namespace bench::layers
