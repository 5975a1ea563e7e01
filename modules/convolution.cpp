#include <pacer/modules/convolution.h>

#include <array>
#include <sstream>
#include <variant>

#include <ATen/autocast_mode.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv3d.h>
#include <ATen/ops/dropout.h>
#include <torch/nn/functional/padding.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/without_dora.h>

namespace pacer::modules {
namespace {

template <size_t D>
torch::nn::detail::ConvNdOptions<D> general_options(const torch::nn::ConvOptions<D>& options) {
  return torch::nn::detail::ConvNdOptions<D>(options.in_channels(), options.out_channels(),
                                             options.kernel_size())
      .stride(options.stride())
      .padding(options.padding())
      .dilation(options.dilation())
      .groups(options.groups())
      .bias(options.bias())
      .padding_mode(options.padding_mode());
}

// `padding`: as LibTorch's operator takes it, numbers or a word.
template <size_t D, class Padding>
at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                       const torch::nn::detail::ConvNdOptions<D>& options, const Padding& padding,
                       int64_t groups) {
  if constexpr (D == 1) {
    return at::conv1d(x, weight, bias, options.stride(), padding, options.dilation(), groups);
  } else if constexpr (D == 2) {
    return at::conv2d(x, weight, bias, options.stride(), padding, options.dilation(), groups);
  } else {
    return at::conv3d(x, weight, bias, options.stride(), padding, options.dilation(), groups);
  }
}

// The convolution with kernels of one point.
template <size_t D>
at::Tensor of_points(const at::Tensor& x, const at::Tensor& weight, int64_t groups) {
  return convolution<D>(x, weight, {}, torch::nn::detail::ConvNdOptions<D>(1, 1, 1),
                        at::IntArrayRef(torch::ExpandingArray<D>(0)), groups);
}

template <size_t D>
bool pads_by_copies(const torch::nn::detail::ConvNdOptions<D>& options) {
  return !std::holds_alternative<torch::enumtype::kZeros>(options.padding_mode());
}

}  // namespace

template <size_t D, class Derived>
ConvolutionImpl<D, Derived>::ConvolutionImpl(const torch::nn::ConvOptions<D>& options)
    : torch::nn::ConvNdImpl<D, Derived>(general_options(options)) {}

// Also what a clone is filled after, so it makes what this layer has become.
template <size_t D, class Derived>
void ConvolutionImpl<D, Derived>::reset() {
  const bool is_frozen = this->weight.defined() && !this->weight.requires_grad();
  const bool bias_is_frozen = this->bias.defined() && !this->bias.requires_grad();
  torch::nn::ConvNdImpl<D, Derived>::reset();
  if (is_frozen) this->weight.requires_grad_(false);
  if (bias_is_frozen) this->bias.requires_grad_(false);
  renew_adapters();
}

template <size_t D, class Derived>
void ConvolutionImpl<D, Derived>::pretty_print(std::ostream& stream) const {
  std::ostringstream text;
  torch::nn::ConvNdImpl<D, Derived>::pretty_print(text);
  stream << "pacer::modules" << text.str().substr(std::string("torch::nn").size());
}

template <size_t D, class Derived>
std::shared_ptr<torch::nn::Module> ConvolutionImpl<D, Derived>::clone(
    const std::optional<torch::Device>& device) const {
  auto copy = torch::nn::ConvNdImpl<D, Derived>::clone(device);
  static_cast<ConvolutionImpl&>(*copy).take_merge_of(*this);
  return copy;
}

// x as it is convolved; where the padding is not of zeros, with it.
template <size_t D, class Derived>
at::Tensor ConvolutionImpl<D, Derived>::padded(const at::Tensor& x) const {
  if (!pads_by_copies(this->options)) return x;
  torch::nn::functional::PadFuncOptions padding(this->_reversed_padding_repeated_twice);
  const auto& mode = this->options.padding_mode();
  if (std::holds_alternative<torch::enumtype::kReflect>(mode)) {
    padding.mode(torch::kReflect);
  } else if (std::holds_alternative<torch::enumtype::kReplicate>(mode)) {
    padding.mode(torch::kReplicate);
  } else {
    padding.mode(torch::kCircular);
  }
  return torch::nn::functional::pad(x, padding);
}

template <size_t D, class Derived>
at::Tensor ConvolutionImpl<D, Derived>::convolved(const at::Tensor& padded_x, const at::Tensor& weight,
                                                  const at::Tensor& bias, int64_t groups) const {
  const auto with = [&](const auto& padding) {
    return convolution<D>(padded_x, weight, bias, this->options, padding, groups);
  };
  const auto& padding = this->options.padding();
  if (pads_by_copies(this->options)) return with(at::IntArrayRef(torch::ExpandingArray<D>(0)));
  if (std::holds_alternative<torch::enumtype::kSame>(padding)) return with(c10::string_view("same"));
  if (std::holds_alternative<torch::enumtype::kValid>(padding)) return with(c10::string_view("valid"));
  return with(at::IntArrayRef(std::get<torch::ExpandingArray<D>>(padding)));
}

template <size_t D, class Derived>
at::Tensor ConvolutionImpl<D, Derived>::forward(const at::Tensor& x) {
  const int64_t groups = this->options.groups();
  const at::Tensor input = padded(x);
  at::Tensor y = convolved(input, this->weight, this->bias, groups);
  if (this->is_merged()) return y;
  for (const LoraAdapter& adapter : active_adapters()) {
    const double p = adapter->options.dropout();
    const bool drops = p > 0 && this->is_training();
    const at::Tensor from = drops ? padded(at::dropout(x, p, /*train=*/true)) : input;
    const at::Tensor low = convolved(from, adapter->A.to(x.scalar_type()), {}, 1);
    y = y + adapter->scale() * of_points<D>(low, adapter->B.to(x.scalar_type()), groups);
  }
  return y;
}

template <size_t D, class Derived>
LoraMatrices ConvolutionImpl<D, Derived>::lora_matrices(int64_t r) const {
  LoraMatrices matrices{
      LoraKind::convolution, {r, this->options.in_channels()}, {this->options.out_channels(), r}};
  matrices.b[1] /= this->options.groups();
  const std::array<int64_t, D> kernel = *this->options.kernel_size();
  matrices.a.insert(matrices.a.end(), kernel.begin(), kernel.end());
  matrices.b.resize(matrices.a.size(), 1);
  return matrices;
}

template <size_t D, class Derived>
std::string ConvolutionImpl<D, Derived>::why_no_adapter(const LoraOptions& lora) const {
  if (lora.dora()) return detail::kWithoutDora;
  const int64_t groups = this->options.groups();
  if (lora.r() % groups == 0) return "";
  return detail::concatenate(
      "has ", groups, " groups, of which the adapter's r, ", lora.r(),
      ", must be a multiple; choose another r, or leave this layer out of the targets");
}

template <size_t D, class Derived>
std::string ConvolutionImpl<D, Derived>::why_no_merge() const {
  if (this->options.groups() == 1) return "";
  return "is that of a convolution with groups, whose adapter takes channels of x that the weight does not; "
         "leave the adapter beside it, or remove_adapter()";
}

template class ConvolutionImpl<1, Conv1dImpl>;
template class ConvolutionImpl<2, Conv2dImpl>;
template class ConvolutionImpl<3, Conv3dImpl>;

}  // namespace pacer::modules
