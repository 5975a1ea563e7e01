#include <pacer/modules/transformer_layer.h>

#include <optional>

#include <pacer/core/error.h>
#include <pacer/modules/detail/attention.h>
#include <pacer/modules/detail/head_sizes.h>
#include <pacer/modules/detail/norm_linear.h>
#include <pacer/modules/detail/norm_mlp.h>
#include <pacer/modules/detail/replay_memory.h>

namespace pacer::modules {
namespace {

using detail::head_dim_of, detail::kv_heads_of;

void check_probability(const char* name, double p) {
  require(p >= 0 && p < 1, "TransformerLayerOptions::", name, " must be in [0, 1), not ", p);
}

void check(const TransformerLayerOptions& options) {
  require(options.heads() > 0 && options.hidden() > 0 &&
              (options.head_dim() || options.hidden() % options.heads() == 0),
          "TransformerLayerOptions::hidden must be a multiple of heads above 0, not ", options.hidden(),
          " with ", options.heads(), " heads; give head_dim for others");
  require(head_dim_of(options) > 0, "TransformerLayerOptions::head_dim must be above 0, not ",
          head_dim_of(options));
  const int64_t kv_heads = kv_heads_of(options);
  require(kv_heads > 0 && options.heads() % kv_heads == 0,
          "TransformerLayerOptions::kv_heads must divide heads, which are ", options.heads(), ", not ",
          kv_heads);
  require((!options.rotary() && !options.qk_norm()) || head_dim_of(options) % 2 == 0,
          "TransformerLayerOptions::rotary and qk_norm need heads of an even number of channels, not ",
          head_dim_of(options));
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
  const int64_t hidden = options.hidden(), head_dim = head_dim_of(options),
                of_heads = options.heads() * head_dim;
  qkv = register_module(
      "qkv", LayerNormLinear(LayerNormLinearOptions(hidden, of_heads + 2 * kv_heads_of(options) * head_dim)
                                 .bias(options.qkv_bias().value_or(options.bias()))
                                 .eps(options.eps())
                                 .normalization(options.normalization())));
  q_norm = k_norm = nullptr;
  if (options.qk_norm()) {
    const RmsNormOptions of_head = RmsNormOptions(head_dim).eps(options.eps());
    q_norm = register_module("q_norm", RmsNorm(of_head));
    k_norm = register_module("k_norm", RmsNorm(of_head));
  }
  projection =
      register_module("projection", Linear(torch::nn::LinearOptions(of_heads, hidden).bias(options.bias())));
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
  detail::HeadRows heads{
      options.heads(), kv_heads_of(options), head_dim_of(options), x.size(1), {}, {}, {}, {}};
  if (options.rotary()) {
    const Rotary::Angles angles = options.rotary()->angles(heads.sequence, heads.head_dim, x.device());
    heads.cosines = angles.cosines;
    heads.sines = angles.sines;
  }
  if (q_norm) {
    const detail::Norm of_q = call.inputs_of(*q_norm, heads.head_dim),
                       of_k = call.inputs_of(*k_norm, heads.head_dim);
    require(of_q.epsilon == of_k.epsilon,
            "TransformerLayer has norms of queries and keys with one eps, not with ", of_q.epsilon, " and ",
            of_k.epsilon, "; give both the same");
    heads.q_weight = of_q.weight;
    heads.k_weight = of_k.weight;
    heads.epsilon = of_q.epsilon;
  }
  const auto [qkv_rows, stream] = detail::norm_linear(call, call.norm_of(*qkv), *qkv->linear, &heads);
  const auto by_heads = [&](const at::Tensor& rows) {
    return rows.view({x.size(0), x.size(1), rows.size(1) / heads.head_dim, heads.head_dim}).transpose(1, 2);
  };
  std::optional<at::Tensor> given_mask;
  if (mask.defined()) given_mask = mask;
  const at::Tensor q = by_heads(qkv_rows[0]), k = by_heads(qkv_rows[1]), v = by_heads(qkv_rows[2]);
  const double dropout = is_training() ? options.attention_dropout() : 0.0;
  const at::Tensor attended = options.window()
                                  ? options.window()->attend(q, k, v, dropout)
                                  : detail::attention(q, k, v, given_mask, dropout, options.causal());
  detail::ProjectedBranch branch;
  branch.x = attended.transpose(1, 2).reshape({call.x().size(0), heads.heads * heads.head_dim});
  branch.linear = projection.get();
  branch.dropout = call.dropout(options.projection_dropout());
  const at::Tensor y =
      detail::norm_mlp(call.behind(stream), *mlp, call.dropout(options.mlp_dropout()), branch)
          .view(x.sizes());
  detail::ReplayMemory::note_result(y);
  return y;
}

}  // namespace pacer::modules
