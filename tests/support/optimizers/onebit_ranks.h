// A 1-bit optimizer on threads as ranks, its gradients set by hand.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>

#include "support/collectives/ranks.h"
#include "support/heard_warnings.h"
#include "support/optimizers/optimizers.h"
#include "support/samples.h"

namespace pacer::testing {

template <class Options>
struct OneBitGroup {
  std::vector<std::vector<int64_t>> shapes;
  Options options;
};
template <class Optimizer>
using GroupsOf = std::vector<OneBitGroup<OptionsOf<Optimizer>>>;

inline Tensor fp32_tensor(const std::vector<float>& values) {
  const Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kFloat);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<float>());
  return tensor;
}
inline std::vector<float> fp32_values(const Tensor& tensor) {
  const Tensor flat = tensor.detach().to(at::kFloat).contiguous();
  return {flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel()};
}
// The tensor's elements are the values [begin, begin + its size), to the bit.
inline bool equals_bits(const Tensor& tensor, const std::vector<float>& values, size_t begin = 0) {
  const Tensor flat = tensor.detach().contiguous();
  const auto count = static_cast<size_t>(flat.numel());
  if (flat.scalar_type() != at::kFloat || begin + count > values.size()) return false;
  return count == 0 || std::memcmp(flat.const_data_ptr<float>(), values.data() + begin, 4 * count) == 0;
}
inline NamedTensors cloned_state(const NamedTensors& state) {
  NamedTensors copy;
  for (const auto& [name, tensor] : state) copy[name] = tensor.detach().clone();
  return copy;
}
// The first name under which two states differ, "" where none does.
inline std::string differing_name(const NamedTensors& a, const NamedTensors& b) {
  for (const auto& [name, tensor] : a) {
    if (b.count(name) == 0 || !same_bits(tensor, b.at(name))) return name;
  }
  for (const auto& [name, tensor] : b) {
    if (a.count(name) == 0) return name;
  }
  return "";
}

// Numbers of like size: a part that all ranks and attempts share, and noise of this one.
inline Tensor onebit_gradient(const Tensor& parameter, uint64_t rank, uint64_t attempt, uint64_t number) {
  Samples shared(1000 + number), own((attempt * 64 + rank) * 1000003 + number);
  const double size = std::pow(10.0, -static_cast<double>(number % 3));
  std::vector<float> values(static_cast<size_t>(parameter.numel()));
  for (float& value : values) {
    value = static_cast<float>(size * (0.3 * (shared.uniform() - 0.5) + own.uniform() - 0.5));
  }
  return fp32_tensor(values).view(parameter.sizes()).to(parameter.scalar_type());
}

template <class Optimizer>
class OneBitRanks {
 public:
  using Options = OptionsOf<Optimizer>;
  using Group = OneBitGroup<Options>;
  using Gradients = std::vector<std::vector<Tensor>>;  // [rank][parameter]; undefined: none

  // `compress_vectors` is that of all groups, whatever their own options say.
  OneBitRanks(int world_size, std::vector<Group> of_groups, at::ScalarType dtype = at::kFloat,
              int ranks_per_node = 0, bool compress_vectors = true)
      : world(Communicator::in_process(world_size, by_nodes_of(ranks_per_node))),
        groups_(std::move(of_groups)) {
    std::vector<Tensor> initial;
    Samples samples(7);
    for (Group& group : groups_) {
      group.options.compress_vectors(compress_vectors);
      for (const auto& shape : group.shapes) {
        std::vector<float> values(static_cast<size_t>(c10::multiply_integers(shape)));
        for (float& value : values) value = static_cast<float>(samples.uniform() - 0.5);
        initial.push_back(fp32_tensor(values).view(shape).to(dtype).requires_grad_());
      }
    }
    said.resize(size());
    for (int rank = 0; rank < world_size; ++rank) {
      parameters.push_back(clones(initial));
      optimizers.push_back(make(static_cast<size_t>(rank), world[static_cast<size_t>(rank)]));
    }
  }

  size_t size() const { return world.size(); }

  Gradients gradients(int64_t attempt) const {
    Gradients all(size());
    for (size_t rank = 0; rank < size(); ++rank) {
      for (size_t i = 0; i < parameters[rank].size(); ++i) {
        all[rank].push_back(onebit_gradient(parameters[rank][i], rank, static_cast<uint64_t>(attempt), i));
      }
    }
    return all;
  }

  void set(const Gradients& gradients) {
    for (size_t rank = 0; rank < size(); ++rank) {
      for (size_t i = 0; i < parameters[rank].size(); ++i) {
        const Tensor& gradient = gradients[rank][i];
        parameters[rank][i].mutable_grad() = gradient.defined() ? gradient.clone() : gradient;
      }
    }
  }
  // The message of the first rank that threw.
  std::string step(const Gradients& gradients) {
    set(gradients);
    return run([&](size_t rank) { optimizers[rank]->step(); });
  }
  std::string run(const std::function<void(size_t)>& f) {
    return first_of(run_ranks(static_cast<int>(size()), [&](int number) {
      const auto rank = static_cast<size_t>(number);
      HeardWarnings ear(said[rank]);
      const c10::WarningUtils::WarningHandlerGuard guard(&ear);
      f(rank);
    }));
  }

  // New parameters, optimizers and communicators that go on from what these export.
  void resume() {
    world = Communicator::in_process(static_cast<int>(size()), world.front()->options());
    for (size_t rank = 0; rank < size(); ++rank) {
      const NamedTensors state = cloned_state(optimizers[rank]->export_state());
      const NamedTensors errors = cloned_state(optimizers[rank]->export_rank_state());
      parameters[rank] = clones(parameters[rank]);
      optimizers[rank] = make(rank, world[rank]);
      optimizers[rank]->import_states(state, errors);
    }
  }

  // fp32, or what master copy or remainder hold.
  Tensor value(size_t rank, size_t i) const {
    const Tensor& p = parameters[rank][i];
    if (p.scalar_type() == at::kFloat) return p.detach();
    const auto found = optimizers[rank]->state().find(p.unsafeGetTensorImpl());
    if (found == optimizers[rank]->state().end()) return p.detach().to(at::kFloat);
    const auto& state = static_cast<const FusedAdamStateFields&>(*found->second);
    if (state.master().defined()) return state.master();
    // Rounded half away, the upper half has taken in the sign of the lower one.
    const Tensor upper = p.detach().view(at::kShort).to(at::kInt), lower = state.remainder().to(at::kInt);
    return (upper * 65536 + lower).contiguous().view(at::kFloat);
  }

  Ranks world;
  std::vector<std::vector<Tensor>> parameters;  // [rank]
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  std::vector<std::string> said;  // [rank]: warnings so far

 private:
  std::unique_ptr<Optimizer> make(size_t rank, const std::shared_ptr<Communicator>& ranks) const {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    auto next = parameters[rank].begin();
    for (const Group& group : groups_) {
      const auto end = next + static_cast<int64_t>(group.shapes.size());
      groups.emplace_back(std::vector<Tensor>(next, end), std::make_unique<Options>(group.options));
      next = end;
    }
    return std::make_unique<Optimizer>(groups, groups_.front().options, ranks);
  }

  std::vector<Group> groups_;
};

}  // namespace pacer::testing
