#include <pacer/modules/embedding.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_renorm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/embedding.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/without_dora.h>

namespace pacer::modules {
namespace {

torch::nn::EmbeddingOptions checked_embedding(torch::nn::EmbeddingOptions options) {
  const int64_t count = options.num_embeddings();
  require(count >= 0 && options.embedding_dim() >= 0,
          "pacer::modules::Embedding needs numbers that are not negative, not ", count, " vectors of ",
          options.embedding_dim());
  if (const std::optional<int64_t> padding = options.padding_idx()) {
    require(*padding >= -count && *padding < count, "the padding_idx of a pacer::modules::Embedding is ",
            *padding, ", which is none of its ", count, " vectors");
    if (*padding < 0) options.padding_idx(count + *padding);
  }
  const at::Tensor& given = options._weight();
  require(!given.defined() ||
              (given.dim() == 2 && given.size(0) == count && given.size(1) == options.embedding_dim()),
          "the _weight of a pacer::modules::Embedding of ", count, " vectors of ", options.embedding_dim(),
          " has another shape");
  return options;
}

}  // namespace

EmbeddingImpl::EmbeddingImpl(const torch::nn::EmbeddingOptions& embedding_options)
    : options(checked_embedding(embedding_options)) {
  EmbeddingImpl::reset();
}

// Also what a clone is filled after, so it makes what this layer has become.
void EmbeddingImpl::reset() {
  const bool is_frozen = weight.defined() && !weight.requires_grad();
  if (options._weight().defined() && !weight.defined()) {
    weight = register_parameter("weight", options._weight(), !is_frozen);
  } else {
    weight = register_parameter("weight", at::empty({options.num_embeddings(), options.embedding_dim()}),
                                !is_frozen);
    reset_parameters();
  }
  renew_adapters();
}

void EmbeddingImpl::reset_parameters() {
  torch::nn::init::normal_(weight);
  if (!options.padding_idx()) return;
  const at::NoGradGuard no_grad;
  weight.select(0, *options.padding_idx()).zero_();
}

void EmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "pacer::modules::Embedding(num_embeddings=" << options.num_embeddings()
         << ", embedding_dim=" << options.embedding_dim();
  if (options.padding_idx()) stream << ", padding_idx=" << *options.padding_idx();
  stream << ")";
}

std::shared_ptr<torch::nn::Module> EmbeddingImpl::clone(const std::optional<torch::Device>& device) const {
  auto copy = Cloneable::clone(device);
  static_cast<EmbeddingImpl&>(*copy).take_merge_of(*this);
  return copy;
}

at::Tensor EmbeddingImpl::rows_of(const at::Tensor& table, const at::Tensor& indices) const {
  return at::embedding(table, indices, options.padding_idx().value_or(-1), options.scale_grad_by_freq(),
                       options.sparse());
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& indices) {
  at::Tensor read = indices;
  if (options.max_norm()) {
    const at::NoGradGuard no_grad;
    read = indices.contiguous();
    at::embedding_renorm_(weight, read, *options.max_norm(), options.norm_type());
  }
  at::Tensor y = rows_of(weight, read);
  if (is_merged()) return y;
  const at::ScalarType dtype = y.scalar_type();
  for (const LoraAdapter& adapter : active_adapters()) {
    y = y + adapter->scale() * at::matmul(rows_of(adapter->A.t(), read), adapter->B.t());
  }
  return y.to(dtype);
}

LoraMatrices EmbeddingImpl::lora_matrices(int64_t r) const {
  return {LoraKind::embedding, {r, options.num_embeddings()}, {options.embedding_dim(), r}};
}

std::string EmbeddingImpl::why_no_adapter(const LoraOptions& lora) const {
  if (lora.dora()) return detail::kWithoutDora;
  if (options.max_norm()) {
    return "changes its vectors in forward (max_norm), which an adapter does not go with; leave it out of "
           "the targets";
  }
  if (options.sparse()) {
    return "has sparse gradients, which the matrices of an adapter do not; make it without sparse(true), or "
           "leave it out of the targets";
  }
  return "";
}

bool is_embedding(const torch::nn::Module& module) {
  return dynamic_cast<const EmbeddingImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::EmbeddingImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&module) != nullptr;
}

}  // namespace pacer::modules
