#include <pacer/modules/detail/adapted_linear.h>

#include <array>
#include <utility>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/node_state.h>
#include <pacer/modules/detail/passes.h>

namespace pacer::detail {
namespace {

// Inputs of the node: x, then of each layer its weight, bias, A and B.
constexpr size_t kOfLayer = 4;
enum Part : size_t { kWeight, kBias, kA, kB };
size_t place(size_t layer, Part part) { return 1 + kOfLayer * layer + part; }

// out = alpha * a b + beta * out.
void product_into(at::Tensor out, const at::Tensor& a, const at::Tensor& b, double alpha, double beta) {
  at::addmm_out(out, out, a, b, beta, alpha);
}

at::Tensor dropped(const at::Tensor& rows, const kernels::Dropout& dropout) {
  return dropout.threshold == 0 ? rows : add_residual({{}, rows, {}, dropout});
}

// All dimensions but the last as one, also where there are no elements.
at::Tensor as_matrix(const at::Tensor& x) {
  const at::IntArrayRef sizes = x.sizes();
  return x.reshape({c10::multiply_integers(sizes.begin(), sizes.end() - 1), sizes.back()});
}

// a b in `dtype`, to which sums in fp32 are rounded only once where the device can do that.
at::Tensor product_as(at::ScalarType dtype, const at::Tensor& a, const at::Tensor& b) {
  const bool widens = a.is_cuda() && dtype == at::kFloat && a.scalar_type() != at::kFloat;
  return widens ? at::mm(a, b, dtype) : at::mm(a, b).to(dtype);
}

at::ScalarType type_of_sums(at::ScalarType dtype) { return dtype == at::kDouble ? dtype : at::kFloat; }

struct AdaptedState : torch::CustomClassHolder {
  at::ScalarType dtype = at::kFloat;
  kernels::Dropout dropout;
  std::vector<modules::Nf4Weight> nf4;  // by layer; null holders where the weight is not in 4 bits
  std::vector<double> scale;            // by layer
  std::vector<int64_t> rank;            // by layer; 0 without adapter
  std::vector<int64_t> sizes;           // of x
  std::vector<at::ScalarType> input_dtypes;
  DefinedMask given;
  size_t defined = 0;
  bool keeps_x = false, keeps_low = false, trains_a = false;
  at::ScalarType type_of_a = at::kFloat;

  size_t layers() const { return nf4.size(); }
  // [out, in], for a product; undefined where the layer has none.
  at::Tensor weight(size_t layer, const at::Tensor& stored) const {
    if (!nf4[layer].is_empty()) return nf4[layer]->decode(dtype);
    return stored.defined() ? stored.to(dtype) : stored;
  }
};

// The result of one layer, row by row into `y`. `low` [rows, r] is what its adapter takes of x; `b` [out, r].
void add_up(const at::Tensor& y, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
            const at::Tensor& low, const at::Tensor& b, double scale) {
  const auto first = [&](const at::Tensor& left, const at::Tensor& right, double alpha) {
    if (bias.defined()) {
      at::Tensor out = y;
      at::addmm_out(out, bias, left, right, 1, alpha);
    } else {
      product_into(y, left, right, alpha, 0);
    }
  };
  if (!b.defined()) return first(x, weight.t(), 1);
  first(low, b.t(), scale);
  if (weight.defined()) product_into(y, x, weight.t(), 1, 1);
}

struct AdaptedLinearNode : torch::autograd::Function<AdaptedLinearNode>, FusedNode<AdaptedState> {
  static Tensors forward(Context* context, StatePtr state, at::TensorList defined) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensors inputs = state->given.expand(defined.vec());
    const at::Tensor x = as_matrix(inputs[0].to(state->dtype));

    // A of all layers below each other, and what they take of x.
    Tensors all_a, all_b(state->layers());
    for (size_t i = 0; i < state->layers(); ++i) {
      if (state->rank[i] == 0) continue;
      all_a.push_back(inputs[place(i, kA)].to(state->dtype));
      all_b[i] = inputs[place(i, kB)].to(state->dtype);
    }
    at::Tensor a, low;
    if (!all_a.empty()) {
      a = all_a.size() == 1 ? all_a[0] : at::cat(all_a);
      low = at::mm(dropped(x, state->dropout), a.t());
    }

    Tensors results;
    int64_t first = 0;
    for (size_t i = 0; i < state->layers(); ++i) {
      const at::Tensor weight = state->weight(i, inputs[place(i, kWeight)]);
      const at::Tensor& bias = inputs[place(i, kBias)];
      const int64_t rank = state->rank[i];
      std::vector<int64_t> sizes = state->sizes;
      sizes.back() = weight.defined() ? weight.size(0) : all_b[i].size(0);
      results.push_back(at::empty(sizes, x.options()));
      add_up(results.back().view({x.size(0), sizes.back()}), x, weight,
             bias.defined() ? bias.to(state->dtype) : bias, rank > 0 ? low.narrow(1, first, rank) : low,
             all_b[i], state->scale[i]);
      first += rank;
    }

    Tensors kept = {state->keeps_x ? x : at::Tensor(), a, state->keeps_low ? low : at::Tensor()};
    for (size_t i = 0; i < state->layers(); ++i) {
      kept.insert(kept.end(), {inputs[place(i, kWeight)], all_b[i]});
    }
    keep(context, std::move(state), std::move(kept));
    return results;
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    refuse_second_derivative();
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const StatePtr state = state_of(context);
    const std::vector<bool> needed = needed_gradients(context, state->given, state->defined);
    SavedTensors kept(context->get_saved_variables());
    const at::Tensor x = kept.next(), a = kept.next(), low = kept.next();
    Tensors weights, all_b, dys;
    for (size_t i = 0; i < state->layers(); ++i) {
      weights.push_back(kept.next());
      all_b.push_back(kept.next());
      const at::Tensor& dy = gradients[i];
      dys.push_back(dy.defined() ? as_matrix(dy.to(state->dtype)) : dy);
    }

    Tensors result(1 + kOfLayer * state->layers());
    const at::Tensor dlow = a.defined() ? low_gradient(*state, dys, all_b) : a;
    at::Tensor da;
    if (state->trains_a && dlow.defined()) {
      da = product_as(state->type_of_a, dlow.t(), dropped(x, state->dropout));
    }
    int64_t first = 0;
    for (size_t i = 0; i < state->layers(); ++i) {
      const int64_t rank = state->rank[i];
      const auto give = [&](Part part, const auto& gradient) {
        if (!dys[i].defined() || !needed[place(i, part)]) return;
        result[place(i, part)] = gradient().to(state->input_dtypes[place(i, part)]);
      };
      give(kWeight, [&] { return product_as(weights[i].scalar_type(), dys[i].t(), x); });
      give(kBias, [&] { return dys[i].sum(0, /*keepdim=*/false, type_of_sums(state->dtype)); });
      give(kA, [&] { return da.narrow(0, first, rank); });
      give(kB, [&] {
        const at::Tensor db = at::empty_like(all_b[i]);
        product_into(db, dys[i].t(), low.narrow(1, first, rank), state->scale[i], 0);
        return db;
      });
      first += rank;
    }
    if (needed[0]) result[0] = input_gradient(*state, dys, weights, a, dlow);
    return FusedNode::result(state->given, std::move(result));
  }

 private:
  // What reaches the low rank of all layers, [rows, ranks]; undefined where nothing does.
  static at::Tensor low_gradient(const AdaptedState& state, const Tensors& dys, const Tensors& all_b) {
    at::Tensor dlow;
    int64_t first = 0, ranks = 0;
    bool is_whole = true;
    for (size_t i = 0; i < dys.size(); ++i) {
      ranks += state.rank[i];
      is_whole = is_whole && (state.rank[i] == 0 || dys[i].defined());
    }
    for (size_t i = 0; i < dys.size(); ++i) {
      if (state.rank[i] > 0 && dys[i].defined()) {
        if (!dlow.defined()) {
          const std::array<int64_t, 2> sizes = {dys[i].size(0), ranks};
          dlow = is_whole ? at::empty(sizes, dys[i].options()) : at::zeros(sizes, dys[i].options());
        }
        product_into(dlow.narrow(1, first, state.rank[i]), dys[i], all_b[i], state.scale[i], 0);
      }
      first += state.rank[i];
    }
    return dlow;
  }

  static at::Tensor input_gradient(const AdaptedState& state, const Tensors& dys, const Tensors& weights,
                                   const at::Tensor& a, const at::Tensor& dlow) {
    at::Tensor dx;
    if (dlow.defined()) dx = dropped(at::mm(dlow, a), state.dropout);
    for (size_t i = 0; i < dys.size(); ++i) {
      if (!dys[i].defined()) continue;
      const at::Tensor weight = state.weight(i, weights[i]);
      if (!weight.defined()) continue;
      if (!dx.defined()) {
        dx = at::mm(dys[i], weight);
      } else {
        product_into(dx, dys[i], weight, 1, 1);
      }
    }
    return dx.defined() ? dx.view(state.sizes).to(state.input_dtypes[0]) : dx;
  }
};

}  // namespace

std::vector<at::Tensor> adapted_linears(const at::Tensor& x, at::ScalarType dtype,
                                        const std::vector<AdaptedLayer>& layers,
                                        const kernels::Dropout& dropout) {
  auto state = c10::make_intrusive<AdaptedState>();
  state->dtype = dtype;
  state->dropout = dropout;
  state->sizes = x.sizes().vec();
  Tensors inputs = {x};
  const bool has_graph = at::GradMode::is_enabled();
  const auto trains = [&](const at::Tensor& tensor) {
    return has_graph && tensor.defined() && tensor.requires_grad();
  };
  for (const AdaptedLayer& layer : layers) {
    state->nf4.push_back(layer.nf4);
    state->scale.push_back(layer.scale);
    state->rank.push_back(layer.A.defined() ? layer.A.size(0) : 0);
    if (trains(layer.A)) state->type_of_a = layer.A.scalar_type();
    state->trains_a = state->trains_a || trains(layer.A);
    state->keeps_x = state->keeps_x || trains(layer.A) || trains(layer.weight);
    state->keeps_low = state->keeps_low || trains(layer.B);
    inputs.insert(inputs.end(), {layer.weight, layer.bias, layer.A, layer.B});
  }
  for (const at::Tensor& input : inputs) {
    state->input_dtypes.push_back(input.defined() ? input.scalar_type() : at::ScalarType::Undefined);
  }
  state->given = DefinedMask(inputs);
  const Tensors defined = state->given.compact(std::move(inputs));
  state->defined = defined.size();
  return AdaptedLinearNode::apply(std::move(state), at::TensorList(defined));
}

}  // namespace pacer::detail
