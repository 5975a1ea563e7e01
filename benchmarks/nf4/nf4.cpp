// What quantising to NF4 and decoding cost, as a fraction of the bandwidth of a copy.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/randn.h>
#include <torch/types.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>
#include <pacer/kernels/nf4.h>

#include "subcommands.h"
#include "support/gpu_time.h"
#include "support/passes.h"
#include "support/table.h"

namespace bench::nf4 {
namespace {

constexpr const char* kAbout =
    R"(Measures what quantising to NF4 and decoding cost, as a fraction of the bandwidth of a copy that is
measured in the same run. On the GPU, or on one thread of the CPU where there is none (or with
--cpu). Prints a JSON line for each kernel, the median of 25. Bytes are those of the rule, each read
or written once; on the GPU several weights take turns, so that none is in the cache when it is
read.

  pacer-bench nf4 [--cpu] [ROWS COLUMNS]
)";

using namespace pacer::kernels;
using at::Tensor;

// A weight in bf16, its numbers in 4 bits, and room for what is decoded: rows are dense, or followed by 64
// more columns each.
class Weight {
 public:
  Weight(int64_t rows, int64_t columns, bool nested, at::Device device) : columns_(columns), nested_(nested) {
    const auto bytes = at::TensorOptions().device(device).dtype(at::kByte);
    const auto floats = bytes.dtype(at::kFloat);
    const int64_t count = rows * columns;
    x_ = (at::randn({count}, floats) * 0.02).to(at::kBFloat16);
    out_ = at::empty({rows * (columns + kMore)}, x_.options());
    codes_ = at::empty({nf4_bytes(count)}, bytes);
    scales_ = at::empty({nf4_blocks(count)}, floats);
    scale_codes_ = at::empty({nf4_blocks(count)}, bytes);
    nested_scales_ = at::empty({nf4_nested_blocks(count)}, floats);
    offset_ = at::empty({1}, floats);
    auto map = nf4_nested_map();
    map_ = at::from_blob(map.data(), {256}, at::kFloat).clone().to(device);
  }

  Nf4Codes view() const {
    Nf4Codes view;
    view.codes = codes_.mutable_data_ptr<uint8_t>();
    view.count = x_.numel();
    if (nested_) {
      view.absmax_codes = scale_codes_.mutable_data_ptr<uint8_t>();
      view.nested_absmax = nested_scales_.mutable_data_ptr<float>();
      view.nested_map = map_.const_data_ptr<float>();
      view.offset = offset_.mutable_data_ptr<float>();
    } else {
      view.absmax = scales_.mutable_data_ptr<float>();
    }
    return view;
  }
  void quantize() const {
    auto* const scratch = scales_.mutable_data_ptr<float>();
    if (x_.is_cuda()) {
      nf4_quantize_cuda(x_.const_data_ptr(), ElementType::bf16, view(), scratch, stream());
    } else {
      nf4_quantize_cpu(x_.const_data_ptr(), ElementType::bf16, view(), scratch);
    }
  }
  void decode(bool dense) const {
    const int64_t stride = columns_ + (dense ? 0 : kMore);
    if (x_.is_cuda()) {
      nf4_decode_cuda(view(), ElementType::bf16, out_.mutable_data_ptr(), columns_, stride, stream());
    } else {
      nf4_decode_cpu(view(), ElementType::bf16, out_.mutable_data_ptr(), columns_, stride, 0,
                     nf4_blocks(x_.numel()));
    }
  }
  // Moves as many bytes as decoding does: what the machine's copy reaches at this size.
  void copy_as_many() const {
    const auto half = static_cast<int64_t>(bytes() / 2);
    out_.view(at::kByte).narrow(0, 0, half).copy_(x_.view(at::kByte).narrow(0, 0, half));
  }
  // Of the matrix in bf16, of its codes, and of scales as they are stored.
  double bytes() const {
    const auto blocks = static_cast<double>(nf4_blocks(x_.numel()));
    const auto nested_blocks = static_cast<double>(nf4_nested_blocks(x_.numel()));
    return 2.0 * static_cast<double>(x_.numel()) + static_cast<double>(nf4_bytes(x_.numel())) +
           (nested_ ? blocks + 4 * nested_blocks : 4 * blocks);
  }

 private:
  static constexpr int64_t kMore = 64;
  Stream stream() const { return pacer::detail::current_stream(x_.device()); }

  int64_t columns_;
  bool nested_;
  Tensor x_, out_, codes_, scales_, scale_codes_, nested_scales_, offset_, map_;
};

void measure(int64_t rows, int64_t columns, at::Device device) {
  const double copy = copy_bandwidth(device, int64_t{1} << 27);
  print(pacer::JsonLine()
            .add("kind", "environment")
            .add("device", device.is_cuda() ? gpu_name() : std::string("one CPU thread"))
            .add("rows", rows)
            .add("columns", columns)
            .add("copy_gigabytes_per_second", copy / 1e9));
  for (const bool nested : {false, true}) {
    std::vector<Weight> weights;
    for (int i = 0; i < (device.is_cuda() ? 4 : 1); ++i) weights.emplace_back(rows, columns, nested, device);
    for (const Weight& weight : weights) weight.quantize();
    const auto report = [&](const char* what, const std::function<void(const Weight&)>& work) {
      size_t turn = 0;
      const Spread time = time_pass(device, [&] { work(weights[turn++ % weights.size()]); });
      const double speed = weights[0].bytes() / (time.median * 1e-3);
      print(pacer::JsonLine()
                .add("kind", "result")
                .add("kernel", what)
                .add("scales", nested ? "double" : "plain")
                .add("ms", time.median)
                .add("ms_min", time.min)
                .add("ms_max", time.max)
                .add("gigabytes_per_second", speed / 1e9)
                .add("fraction_of_copy", speed / copy));
    };
    report("copy of as many bytes", [](const Weight& weight) { weight.copy_as_many(); });
    report("quantize", [](const Weight& weight) { weight.quantize(); });
    report("decode", [](const Weight& weight) { weight.decode(true); });
    report("decode to wider rows", [](const Weight& weight) { weight.decode(false); });
  }
}

int run(const examples::OptionValues& given) {
  const bool on_gpu = given.count("cpu") == 0 && !gpu_name().empty();
  measure(number_in(given, "rows"), number_in(given, "columns"),
          on_gpu ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU));
  return 0;
}

}  // namespace

Subcommand subcommand() {
  Subcommand nf4{"nf4", "quantising to NF4 and decoding, beside a copy", kAbout, run};
  nf4.options.add_options()                                                 //
      ("cpu", "one thread of the CPU, also where there is a GPU")           //
      ("rows", whole_number(4096), "of the matrix: a layer of LLaMA-7B's")  //
      ("columns", whole_number(11008), "of the matrix");
  nf4.without_dashes = "rows,columns";
  return nf4;
}

}  // namespace bench::nf4
