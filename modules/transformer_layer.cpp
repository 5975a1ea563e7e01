#include <pacer/modules/transformer_layer.h>

#include <optional>

#include <ATen/ops/scaled_dot_product_attention.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/norm_linear.h>
#include <pacer/modules/detail/norm_mlp.h>

namespace pacer::modules {
namespace {

void check_probability(const char* name, double p) {
  require(p >= 0 && p < 1, "TransformerLayerOptions::", name, " must be in [0, 1), not ", p);
}

void check(const TransformerLayerOptions& options) {
  require(options.heads() > 0 && options.hidden() > 0 && options.hidden() % options.heads() == 0,
          "TransformerLayerOptions::hidden must be a multiple of heads above 0, not ", options.hidden(),
          " with ", options.heads(), " heads");
  require(!options.window() || options.causal(),
          "TransformerLayerOptions::window is one of causal attention; set causal(true), too");
  check_probability("attention_dropout", options.attention_dropout());
  check_probability("projection_dropout", options.projection_dropout());
  check_probability("mlp_dropout", options.mlp_dropout());
}

}  // namespace

TransformerLayerImpl::TransformerLayerImpl(const TransformerLayerOptions& layer_options)
    : options(layer_options) {
  check(options);
  TransformerLayerImpl::reset();
}

void TransformerLayerImpl::reset() {
  const int64_t hidden = options.hidden();
  qkv = register_module("qkv", LayerNormLinear(LayerNormLinearOptions(hidden, 3 * hidden)
                                                   .bias(options.bias())
                                                   .eps(options.eps())
                                                   .normalization(options.normalization())));
  projection =
      register_module("projection", Linear(torch::nn::LinearOptions(hidden, hidden).bias(options.bias())));
  mlp = register_module("mlp", LayerNormMlp(LayerNormMlpOptions(hidden, options.ffn())
                                                .activation(options.activation())
                                                .bias(options.bias())
                                                .eps(options.eps())
                                                .normalization(options.normalization())
                                                .residual(true)
                                                .dropout(options.mlp_dropout())));
}

at::Tensor TransformerLayerImpl::forward(const at::Tensor& x, const at::Tensor& mask) {
  require(x.dim() == 3, "TransformerLayer takes [batch, sequence, ", options.hidden(), "], not ", x.sizes());
  require(!mask.defined() || !options.causal(),
          "TransformerLayer takes no mask with causal(true); leave one of them out");
  const detail::FusedCall call("TransformerLayer", x, options.hidden(),
                               {qkv->linear.get(), projection.get(), mlp->fc1.get(), mlp->fc2.get()},
                               is_training());
  const auto [qkv_rows, stream] =
      detail::norm_linear(call, call.norm_of(*qkv), *qkv->linear, /*in_three=*/true);
  const auto by_heads = [&](const at::Tensor& rows) {
    const int64_t heads = options.heads();
    return rows.view({x.size(0), x.size(1), heads, options.hidden() / heads}).transpose(1, 2);
  };
  std::optional<at::Tensor> given_mask;
  if (mask.defined()) given_mask = mask;
  const at::Tensor q = by_heads(qkv_rows[0]), k = by_heads(qkv_rows[1]), v = by_heads(qkv_rows[2]);
  const double dropout = is_training() ? options.attention_dropout() : 0.0;
  const at::Tensor attended =
      options.window() ? options.window()->attend(q, k, v, dropout)
                       : at::scaled_dot_product_attention(q, k, v, given_mask, dropout, options.causal());
  detail::ProjectedBranch branch;
  branch.x = attended.transpose(1, 2).reshape(call.x().sizes());
  branch.linear = projection.get();
  branch.dropout = call.dropout(options.projection_dropout());
  return detail::norm_mlp(call.behind(stream), *mlp, call.dropout(options.mlp_dropout()), branch)
      .view(x.sizes());
}

}  // namespace pacer::modules
