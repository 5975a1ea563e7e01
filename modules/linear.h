// A linear layer with the parameters, names and initial values of torch::nn::Linear, whose storage,
// arithmetic and additions may change during its life:
//
//   storage     16 or 32 bits; or 4 bits, frozen, after quantize() (nf4.h)
//   arithmetic  the dtype of x or of autocast; or 8-bit floats while an Fp8Scope of a scaling that knows the
//               layer is alive, as Precision::fp8 has it
//   adapters    none; or low-rank ones, some of them active, after add_lora() (lora.h)
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/options/linear.h>
#include <torch/nn/pimpl.h>

#include <pacer/modules/lora_layer.h>
#include <pacer/modules/nf4_weight.h>

namespace pacer::modules {

class LinearImpl : public torch::nn::Cloneable<LinearImpl>, public LoraLayer {
 public:
  LinearImpl(int64_t in_features, int64_t out_features)
      : LinearImpl(torch::nn::LinearOptions(in_features, out_features)) {}
  explicit LinearImpl(const torch::nn::LinearOptions& options);

  void reset() override;
  // Draws weight and bias anew, as torch::nn::Linear does.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

  // x [..., in_features] -> [..., out_features]. In 8-bit floats, and with an adapter or 4-bit storage, the
  // result has the dtype of autocast; without autocast that of x, or bf16 where x is fp32 and products are of
  // 8 bits. With an adapter or 4-bit storage there is no second derivative.
  at::Tensor forward(const at::Tensor& x);

  torch::nn::LinearOptions options;
  at::Tensor weight;  // [out_features, in_features]; undefined while it is in 4 bits
  at::Tensor bias;    // [out_features]; undefined with options.bias(false)

  // The weight in 4 bits; a null holder where it is not.
  const Nf4Weight& nf4() const { return nf4_; }
  // Puts a weight in 4 bits in place of the one that is there, whatever its storage; the parameter "weight"
  // is then gone. InvalidArgument for other sizes, and while an adapter is merged.
  void set_nf4(Nf4Weight nf4);
  // Back to a parameter, of the dtype that it had, frozen.
  void dequantize();

  // Whether it is what torch::nn::Linear is: neither 4-bit storage nor adapters.
  bool is_plain() const { return !nf4_ && adapters().empty(); }

  LoraMatrices lora_matrices(int64_t r) const override;
  std::string why_no_adapter(const LoraOptions& lora) const override;
  std::string why_no_merge() const override;
  at::Tensor weight_values() const override;
  at::Tensor stored_weight() const override;

 private:
  torch::nn::Module& module() override { return *this; }

  Nf4Weight nf4_ = nullptr;
};
TORCH_MODULE(Linear);

// The results of layers that share their input, as queries, keys and values do, or gate and up: of what their
// adapters take of x there is one product instead of one each. x [..., in_features of all] -> one result per
// layer. Adapters that drop parts of x drop the same ones in all of these layers, and must agree on the
// probability. Layers without adapters, and in 8-bit floats, compute as forward() does.
std::vector<at::Tensor> forward_together(const at::Tensor& x, const std::vector<Linear>& layers);

}  // namespace pacer::modules
