// What users do to parameters, options and states between two steps, each done to an optimizer and to its
// restatement.
#pragma once

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torch/serialize.h>

#include "support/checkpoints/archives.h"
#include "support/optimizers/lifecycle_run.h"

namespace pacer::testing {

// What is done between steps. `apply` does it to the optimizer and to the reference; it throws where it is
// refused at once. `undo` ends it some steps later, where it has an end.
struct LifecycleEdit {
  const char* name;
  std::function<void(Lifecycle&)> apply;
  std::function<void(Lifecycle&)> undo = nullptr;
  bool is_only_time = false;  // then the result has the bits of a run without it
};

namespace lifecycle_edits {

inline void scale(Lifecycle& run, double factor) {
  for (double& p : run.reference.parameters[0].p) p *= factor;
}
// Every second element, in row-major order, becomes zero.
inline Tensor mask_of(const Tensor& p) {
  return torch::arange(p.numel(), at::kLong).remainder(2).view(p.sizes()).to(p.device()).to(p.scalar_type());
}
inline void mask_reference(Lifecycle& run) {
  auto& values = run.reference.parameters[0].p;
  for (size_t k = 0; k < values.size(); k += 2) values[k] = 0;
}
inline void to_dtype(Lifecycle& run) {
  Tensor& p = run.parameters[0];
  p.set_data(p.detach().to(p.scalar_type() == at::kFloat ? at::kBFloat16 : at::kFloat));
  run.coarsen(6e-3);
}
inline void load(Lifecycle& run, const std::function<void(NamedTensors&, NamedTensors&)>& change = nullptr) {
  NamedTensors state = cloned_state(run.own->export_state()),
               errors = cloned_state(run.own->export_rank_state());
  if (change) change(state, errors);
  for (auto* tensors : {&state, &errors}) {  // a file holds everything row by row
    for (auto& item : *tensors) item.second = item.second.cpu().contiguous();
  }
  auto other = run.another();
  dynamic_cast<SessionOptimizer&>(*other).import_states(state, errors);
  run.take(std::move(other));
}
inline void load_from_torch(Lifecycle& run) {
  const auto load_as = [&](auto& theirs) {
    for (size_t j = 0; j < run.parameters.size(); ++j) {
      auto& moments = run.reference.parameters[j];
      moments.m.assign(moments.m.size(), 0), moments.v.assign(moments.v.size(), 0), moments.t = 0;
      moments.largest_v = moments.v;
    }
    std::stringstream file;
    torch::serialize::OutputArchive out;
    theirs.save(out);
    out.save_to(file);
    torch::serialize::InputArchive in;
    in.load_from(file);
    run.optimizer->load(in);
    const NamedTensors state = run.own->export_state();
    const bool is_l2 = dynamic_cast<FusedAdam*>(run.optimizer.get()) != nullptr;
    for (auto& parameter : run.reference.parameters) {
      parameter.options = LifecycleOptions(state, parameter.group, is_l2);
    }
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& group : run.optimizer->param_groups()) groups.emplace_back(group.params());
  if (dynamic_cast<FusedAdam*>(run.optimizer.get()) != nullptr) {
    torch::optim::Adam theirs(groups, torch::optim::AdamOptions(0.02));
    load_as(theirs);
  } else if (dynamic_cast<FusedSgd*>(run.optimizer.get()) != nullptr) {
    torch::optim::SGD theirs(groups, torch::optim::SGDOptions(0.02).momentum(0.5));
    load_as(theirs);
  } else if (dynamic_cast<FusedRmsprop*>(run.optimizer.get()) != nullptr) {
    const auto options = torch::optim::RMSpropOptions(0.02).momentum(0.5).centered(true);
    torch::optim::RMSprop theirs(groups, options);
    load_as(theirs);
  } else {
    torch::optim::AdamW theirs(groups, torch::optim::AdamWOptions(0.02));
    load_as(theirs);
  }
}
inline void add_parameter(Lifecycle& run) {
  Samples samples(9);
  const Tensor added = run.make({5, 2}, samples);
  const LifecycleParameter& first = run.reference.parameters[0];
  run.optimizer->param_groups()[first.group].params().push_back(added);
  run.parameters.push_back(added);
  run.reference.parameters.emplace_back(first.options, first.group, doubles_of(added));
  run.reference.parameters.back().rows = rows_of(added);
}
inline void add_group(Lifecycle& run) {
  Samples samples(9);
  const Tensor added = run.make({5, 2}, samples);
  const LifecycleParameter& first = run.reference.parameters[0];
  torch::optim::OptimizerParamGroup group({added},
                                          run.optimizer->param_groups()[first.group].options().clone());
  if (auto* onebit = dynamic_cast<OneBitOptimizer*>(run.optimizer.get())) {
    onebit->add_param_group(group);
  } else {
    static_cast<FusedOptimizer&>(*run.optimizer).add_param_group(group);
  }
  run.parameters.push_back(added);
  run.reference.parameters.emplace_back(first.options, run.optimizer->param_groups().size() - 1,
                                        doubles_of(added));
  run.reference.parameters.back().rows = rows_of(added);
}
inline void remove_parameter(Lifecycle& run) {
  auto& list = run.optimizer->param_groups()[0].params();
  list.erase(list.begin());
  run.parameters.erase(run.parameters.begin());
  run.reference.parameters.erase(run.reference.parameters.begin());
}
inline void use_equal_names(Lifecycle& run) {
  std::vector<NamedParamGroup> groups;
  for (const auto& group : run.optimizer->param_groups()) {
    for (const Tensor& p : group.params()) {
      NamedParameters one;
      one.insert("weight", p);
      groups.emplace_back(one, group.options().clone());
    }
  }
  const auto& options = groups.front().options;
  const auto build = [&](auto* type) {
    using Options = std::remove_pointer_t<decltype(type)>;
    return dynamic_cast<const Options*>(options.get());
  };
  if (const auto* adamw = build(static_cast<FusedAdamWOptions*>(nullptr))) FusedAdamW(groups, *adamw);
  if (const auto* adam = build(static_cast<FusedAdamOptions*>(nullptr))) FusedAdam(groups, *adam);
  if (const auto* muon = build(static_cast<MuonOptions*>(nullptr))) Muon(groups, *muon);
  if (const auto* sgd = build(static_cast<FusedSgdOptions*>(nullptr))) FusedSgd(groups, *sgd);
  if (const auto* rms = build(static_cast<FusedRmspropOptions*>(nullptr))) FusedRmsprop(groups, *rms);
  if (const auto* free = build(static_cast<ScheduleFreeAdamWOptions*>(nullptr)))
    ScheduleFreeAdamW(groups, *free);
  if (const auto* lamb = build(static_cast<FusedLambOptions*>(nullptr))) FusedLamb(groups, *lamb);
  const auto world = Communicator::alone(run.parameters[0].device());
  if (const auto* onebit = build(static_cast<OneBitAdamOptions*>(nullptr)))
    OneBitAdam(groups, *onebit, world);
  if (const auto* muon = build(static_cast<OneBitMuonOptions*>(nullptr))) OneBitMuon(groups, *muon, world);
  if (const auto* onebit = build(static_cast<OneBitLambOptions*>(nullptr)))
    OneBitLamb(groups, *onebit, world);
}

}  // namespace lifecycle_edits

inline const std::vector<LifecycleEdit>& all_lifecycle_edits() {
  using namespace lifecycle_edits;
  const auto freeze = [](bool trained) {
    return [trained](Lifecycle& run) {
      run.parameters[0].requires_grad_(trained);
      run.reference.parameters[0].trained = trained;
    };
  };
  const auto as_version_1 = [](NamedTensors& state, NamedTensors& errors) {
    state.erase("state_version");
    errors.erase("onebit/state_version");
    for (auto item = errors.begin(); item != errors.end();) {
      item = contains(item->first, "/strides") ? errors.erase(item) : std::next(item);
    }
  };
  static const std::vector<LifecycleEdit> edits = {
      {"set_data, same layout",
       [](Lifecycle& run) {
         Tensor& p = run.parameters[0];
         p.set_data(in_layout(p.detach().contiguous() * 2, run.layout()).detach());
         scale(run, 2);
       }},
      {"set_data, other layout",
       [](Lifecycle& run) {
         Tensor& p = run.parameters[0];
         const bool plain = run.layout() == Layout::row_major || !p.is_non_overlapping_and_dense();
         p.set_data(
             in_layout(p.detach().contiguous(), plain ? Layout::transposed : Layout::row_major).detach());
       }},
      {"set_data, other dtype", to_dtype},
      {"zeros written",
       [](Lifecycle& run) {
         const torch::NoGradGuard no_grad;
         run.parameters[0].mul_(mask_of(run.parameters[0]));
         mask_reference(run);
       }},
      {"zeros written through data()",
       [](Lifecycle& run) {
         run.parameters[0].data().mul_(mask_of(run.parameters[0]));
         mask_reference(run);
       }},
      {"scaled through data()",
       [](Lifecycle& run) {
         run.parameters[0].data().mul_(0.5);
         scale(run, 0.5);
       }},
      {"requires_grad off, and on", freeze(false), freeze(true)},
      {"parameter added", add_parameter},
      {"parameter removed", remove_parameter},
      {"group added", add_group},
      {"loaded from its own file", [](Lifecycle& run) { load(run); }, nullptr, true},
      {"loaded from an older file", [=](Lifecycle& run) { load(run, as_version_1); }, nullptr, true},
      {"loaded from a newer file",
       [](Lifecycle& run) {
         load(run, [](NamedTensors& state, NamedTensors&) {
           state["state_version"] = number_tensor(int64_t{99});
           state["group/0/from_the_future"] = number_tensor(1.0);
         });
       }},
      {"loaded from torch's file", load_from_torch},
      {"equal names", use_equal_names},
  };
  return edits;
}

}  // namespace pacer::testing
