#include <pacer/modules/detail/adapted_forward.h>

#include <ATen/ops/cat.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/adapted_linear.h>
#include <pacer/modules/detail/draw_dropout.h>
#include <pacer/modules/detail/fp8_linear.h>
#include <pacer/modules/detail/product.h>
#include <pacer/modules/fp8_scaling.h>

namespace pacer::detail {
namespace {

using Adapters = std::vector<modules::LoraAdapter>;

// Of the adapters that take part; all of them must agree, because they share what they drop.
double common_dropout(const std::vector<Adapters>& active) {
  double p = 0;
  bool is_first = true;
  for (const Adapters& of_layer : active) {
    for (const modules::LoraAdapter& adapter : of_layer) {
      require(is_first || adapter->options.dropout() == p,
              "what computes together has adapters with dropout ", p, " and ", adapter->options.dropout(),
              "; give them one, or call forward() of each layer");
      p = adapter->options.dropout();
      is_first = false;
    }
  }
  return p;
}

// The adapters that take part beside the weight. Merged ones are part of the weight.
Adapters adapters_beside(const modules::LinearImpl& layer) {
  return layer.is_merged() ? Adapters() : layer.active_adapters();
}

// Several adapters of a layer are one whose rank is the sum of theirs.
void put_adapters(const Adapters& active, AdaptedLayer& layer) {
  if (active.empty()) return;
  if (active.size() == 1) {
    layer.A = active[0]->A;
    layer.B = active[0]->B;
    layer.scale = active[0]->scale();
    return;
  }
  std::vector<at::Tensor> all_a, all_b;
  for (const modules::LoraAdapter& adapter : active) {
    all_a.push_back(adapter->A);
    all_b.push_back(adapter->scale() * adapter->B);
  }
  layer.A = at::cat(all_a);
  layer.B = at::cat(all_b, 1);
}

// The adapter that scales what the layer computes but for its bias; a null holder where none does.
modules::LoraAdapter scaling_adapter(const Adapters& active) {
  return !active.empty() && active[0]->options.dora() ? active[0] : modules::LoraAdapter(nullptr);
}

// Of the products of a layer with such an adapter the result.
at::Tensor with_magnitudes(const at::Tensor& products, const modules::LinearImpl& layer,
                           const modules::LoraAdapter& adapter) {
  const at::Tensor y = products * adapter->row_factors(layer.weight_values());
  return (layer.bias.defined() ? y + layer.bias : y).to(products.scalar_type());
}

// How a layer computes in 8-bit floats; null where it does not.
Fp8LayerPtr fp8_layer_of(const modules::LinearImpl& layer) {
  Fp8LayerPtr fp8 = fp8_layer(layer);
  const bool takes_part =
      layer.nf4().is_empty() || (fp8 && Fp8Scope::current()->options().quantized_weights());
  return takes_part ? fp8 : nullptr;
}

}  // namespace

bool is_adapted(const modules::LinearImpl& layer) {
  return !layer.nf4().is_empty() || !adapters_beside(layer).empty();
}

std::vector<at::Tensor> adapted_forward(const at::Tensor& x,
                                        const std::vector<const modules::LinearImpl*>& layers) {
  std::vector<Adapters> active;
  bool is_training = false;
  for (const modules::LinearImpl* layer : layers) {
    require(x.dim() >= 1 && x.size(-1) == layer->options.in_features(), "pacer::modules::Linear takes [..., ",
            layer->options.in_features(), "], not ", x.sizes());
    active.push_back(adapters_beside(*layer));
    is_training = is_training || layer->is_training();
  }
  const double p = is_training ? common_dropout(active) : 0;
  require(
      p == 0 || (x.size(-1) % 4 == 0 && x.scalar_type() != at::kDouble),
      "dropout of an adapter needs a number of features that is a multiple of 4, and no Double, but x is ",
      x.scalar_type(), " of shape ", x.sizes());

  std::vector<AdaptedLayer> work;
  std::vector<at::Tensor> bases(layers.size());  // what is computed in 8-bit floats
  bool in_8_bits = false;
  for (size_t i = 0; i < layers.size(); ++i) {
    const modules::LinearImpl& layer = *layers[i];
    AdaptedLayer adapted;
    adapted.nf4 = layer.nf4();
    adapted.weight = layer.weight;
    const at::Tensor bias = scaling_adapter(active[i]).is_empty() ? layer.bias : at::Tensor();
    adapted.bias = bias;
    put_adapters(active[i], adapted);
    if (const Fp8LayerPtr fp8 = fp8_layer_of(layer)) {
      in_8_bits = true;
      const bool records = pass_records(layer.is_training());
      bases[i] = layer.nf4().is_empty() ? fp8_linear(fp8, x, layer.weight, bias, records)
                                        : fp8_linear(fp8, x, layer.nf4(), bias, records);
    }
    if (bases[i].defined()) {
      adapted.nf4 = nullptr;
      adapted.weight = adapted.bias = at::Tensor();
      if (active[i].empty()) continue;
    }
    work.push_back(std::move(adapted));
  }
  if (work.empty()) return bases;
  std::vector<at::Tensor> results =
      adapted_linears(x, computing_type(x, in_8_bits), work, draw_dropout(p, x.device()));
  size_t next = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const bool took_part = !bases[i].defined() || !active[i].empty();
    if (!took_part) continue;
    bases[i] = bases[i].defined() ? bases[i].add(results[next]) : results[next];
    ++next;
    const modules::LoraAdapter scaling = scaling_adapter(active[i]);
    if (!scaling.is_empty()) bases[i] = with_magnitudes(bases[i], *layers[i], scaling);
  }
  return bases;
}

}  // namespace pacer::detail
