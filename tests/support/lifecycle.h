// What users do to parameters and optimizers between two steps, to every registered optimizer, in both
// phases, dtypes and memory orders: a table of edits, and what each cell of it came to. The only outcomes are
// equality with an fp64 restatement that does the same, and refusal in one sentence with nothing changed.
#pragma once

#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torch/serialize.h>

#include <pacer/optimizers/fused_adam.h>

#include "support/archives.h"
#include "support/lifecycle_reference.h"
#include "support/onebit_ranks.h"
#include "support/registry.h"

namespace pacer::testing {

enum class Layout { row_major, channels_last, transposed, gaps };
inline const std::vector<Layout> kAllLayouts = {Layout::row_major, Layout::channels_last, Layout::transposed,
                                                Layout::gaps};

// A leaf of that layout with the values of a row-major tensor.
inline Tensor in_layout(const Tensor& values, Layout layout) {
  Tensor tensor = values.clone();
  if (layout == Layout::channels_last && values.dim() == 4)
    tensor = values.contiguous(at::MemoryFormat::ChannelsLast);
  if (layout == Layout::transposed && values.dim() >= 2) {
    tensor = values.transpose(0, 1).contiguous().transpose(0, 1);
  }
  if (layout == Layout::gaps && values.dim() >= 1) {
    std::vector<int64_t> sizes = values.sizes().vec();
    sizes.back() *= 2;
    tensor = torch::zeros(sizes, values.options()).slice(-1, 0, sizes.back(), 2).copy_(values);
  }
  return tensor.detach().requires_grad_();
}

inline Doubles doubles_of(const Tensor& tensor) {
  const Tensor flat = tensor.detach().cpu().to(at::kDouble).contiguous().view({-1});
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

// One optimizer over a few parameters, and what it must be equal to.
class Lifecycle {
 public:
  Lifecycle(RegisteredOptimizer entry, at::ScalarType dtype, Layout layout, at::Device device)
      : entry_(std::move(entry)), dtype_(dtype), layout_(layout), device_(device) {
    Samples samples(3);
    const std::vector<std::pair<std::string, std::vector<int64_t>>> shapes = {
        {"convolution", {4, 3, 2, 2}}, {"matrix", {6, 5}}, {"bias", {7}}};
    for (const auto& [name, shape] : shapes) named_.insert(name, make(shape, samples));
    optimizer = entry_.make(named_, Communicator::alone(device));
    own = dynamic_cast<SessionOptimizer*>(optimizer.get());
    own->name_parameters(named_);
    const NamedTensors state = own->export_state();
    const bool is_l2 = dynamic_cast<FusedAdam*>(optimizer.get()) != nullptr;
    for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
      for (const Tensor& parameter : optimizer->param_groups()[g].params()) {
        parameters.push_back(parameter);
        reference.parameters.emplace_back(LifecycleOptions(state, g, is_l2), g, doubles_of(parameter));
      }
    }
  }

  Tensor make(const std::vector<int64_t>& shape, Samples& samples) const {
    Tensor values = torch::empty(shape, at::kDouble);
    for (int64_t k = 0; k < values.numel(); ++k) values.view({-1})[k] = samples.uniform() - 0.5;
    return in_layout(values.to(dtype_).to(device_), layout_);
  }

  // With gradients for the parameters that are trained.
  void step(int steps = 1) {
    for (int i = 0; i < steps; ++i, ++taken_) {
      std::vector<std::optional<Doubles>> gradients(parameters.size());
      for (size_t j = 0; j < parameters.size(); ++j) {
        Tensor& p = parameters[j];
        p.mutable_grad() = Tensor();
        if (!p.requires_grad()) continue;
        const Tensor gradient =
            onebit_gradient(torch::empty(p.sizes(), at::kFloat), 0, static_cast<uint64_t>(taken_), j);
        p.mutable_grad() = gradient.to(p.scalar_type()).to(device_);
        gradients[j] = doubles_of(p.grad());
      }
      const HeardQuietly quiet;
      optimizer->step();
      reference.step(gradients);
    }
  }

  bool is_onebit() const { return reference.parameters.front().options.freeze_step > 0; }

  // By how many learning rates the parameters are further from the reference than their dtype explains.
  double apart() const {
    double worst = 0;
    for (size_t j = 0; j < parameters.size(); ++j) {
      const Doubles values = doubles_of(parameters[j]);
      const LifecycleParameter& expected = reference.parameters[j];
      for (size_t k = 0; k < values.size(); ++k) {
        const double off =
            std::abs(values[k] - expected.p[k]) - unit(parameters[j]) * (1 + std::abs(expected.p[k]));
        worst = std::isfinite(values[k]) ? std::max(worst, off / expected.options.lr) : HUGE_VAL;
      }
    }
    return worst;
  }

  // Values, gradients and state tensors, to the bit.
  std::vector<Tensor> everything() const {
    std::vector<Tensor> all;
    for (const Tensor& p : parameters) {
      all.push_back(copy_of(p));
      const auto found = optimizer->state().find(p.unsafeGetTensorImpl());
      if (found == optimizer->state().end()) continue;
      const auto& state = static_cast<const FusedAdamStateFields&>(*found->second);
      for (const Tensor& tensor : {state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(),
                                   state.master(), state.remainder(), state.trust_average()}) {
        all.push_back(copy_of(tensor));
      }
      all.push_back(torch::tensor(state.step()));
    }
    return all;
  }

  // A new optimizer over the same parameters.
  std::unique_ptr<torch::optim::Optimizer> another() const {
    auto made = entry_.make(named_, Communicator::alone(device_));
    dynamic_cast<SessionOptimizer&>(*made).name_parameters(named_);
    return made;
  }
  void take(std::unique_ptr<torch::optim::Optimizer> other) {
    optimizer = std::move(other);
    own = dynamic_cast<SessionOptimizer*>(optimizer.get());
  }
  const NamedParameters& named() const { return named_; }
  const RegisteredOptimizer& entry() const { return entry_; }
  Layout layout() const { return layout_; }
  void coarsen(double unit) { coarsest_ = std::max(coarsest_, unit); }

  std::unique_ptr<torch::optim::Optimizer> optimizer;
  SessionOptimizer* own = nullptr;
  std::vector<Tensor> parameters;  // in the optimizer's order
  LifecycleReference reference;

 private:
  struct HeardQuietly {
    HeardQuietly() : ear(said), guard(&ear) {}
    std::string said;
    HeardWarnings ear;
    const c10::WarningUtils::WarningHandlerGuard guard;
  };

  // What one value of that dtype may be off after some steps and an edit that rounded it.
  double unit(const Tensor& p) const {
    const bool has_no_master = entry_.name.find("nearest") != std::string::npos ||
                               entry_.name.find("stochastic") != std::string::npos;
    if (has_no_master && p.scalar_type() == at::kBFloat16) return 0.05;  // 16 digits only, moments as well
    const double own = p.scalar_type() == at::kDouble  ? 1e-12
                       : p.scalar_type() == at::kFloat ? 2e-6
                       : p.scalar_type() == at::kHalf  ? 1e-3
                                                       : 6e-3;
    return std::max(own, coarsest_);
  }

  RegisteredOptimizer entry_;
  at::ScalarType dtype_;
  Layout layout_;
  at::Device device_;
  NamedParameters named_;
  int64_t taken_ = 0;
  double coarsest_ = 0;
};

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
  if (const auto* lamb = build(static_cast<FusedLambOptions*>(nullptr))) FusedLamb(groups, *lamb);
  const auto world = Communicator::alone(run.parameters[0].device());
  if (const auto* onebit = build(static_cast<OneBitAdamOptions*>(nullptr)))
    OneBitAdam(groups, *onebit, world);
  if (const auto* onebit = build(static_cast<OneBitLambOptions*>(nullptr)))
    OneBitLamb(groups, *onebit, world);
}

}  // namespace lifecycle_edits

inline const std::vector<LifecycleEdit>& lifecycle_table() {
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
  static const std::vector<LifecycleEdit> table = {
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
  return table;
}

struct LifecycleCount {
  int equal = 0;
  int refused = 0;  // of which so many optimizers cannot be made at all:
  int impossible = 0;
  std::vector<std::string> wrong;  // cells that are neither
};

inline std::string first_lines(const std::vector<std::string>& all) {
  std::string text;
  for (size_t i = 0; i < all.size() && i < 40; ++i) text += all[i] + "\n";
  return text;
}

// One cell: steps, the edit, more steps. "": equal; a sentence: refused; "<...>": neither.
inline std::string lifecycle_outcome(Lifecycle& run, const LifecycleEdit& edit, int steps_before) {
  run.step(steps_before);
  if (run.apart() > 0.05)
    return "<apart before the edit by " + std::to_string(run.apart()) + " learning rates>";
  std::vector<Tensor> before = run.everything();
  const auto refused = [&](const std::string& sentence) {
    if (contains(sentence, "\n")) return "<more than a sentence> " + sentence;
    return same_bits(before, run.everything()) ? sentence : "<changed> " + sentence;
  };
  try {
    edit.apply(run);
    before = run.everything();
    run.step(1);
  } catch (const InvalidArgument& error) {
    return refused(error.what());
  } catch (const std::exception& error) {
    return std::string("<another exception> ") + error.what();
  }
  run.step(2);
  if (edit.undo) edit.undo(run);
  run.step(3);
  if (run.apart() > 0.05) return "<apart by " + std::to_string(run.apart()) + " learning rates>";
  return "";
}

inline LifecycleCount run_lifecycles(at::Device device, const std::vector<at::ScalarType>& dtypes,
                                     const std::vector<Layout>& layouts = kAllLayouts) {
  LifecycleCount count;
  for (const RegisteredOptimizer& entry : all_optimizers()) {
    if (!entry.is_own) continue;
    for (const at::ScalarType dtype : dtypes) {
      for (const Layout layout : layouts) {
        for (const LifecycleEdit& edit : lifecycle_table()) {
          for (const bool frozen : {false, true}) {
            const std::string cell = entry.name + ", " + c10::toString(dtype) + ", layout " +
                                     std::to_string(static_cast<int>(layout)) + ", " + edit.name +
                                     (frozen ? ", frozen" : "");
            std::string outcome;
            try {
              Lifecycle run(entry, dtype, layout, device);
              if (frozen && !run.is_onebit()) continue;
              outcome = lifecycle_outcome(run, edit, frozen ? 4 : 1);
              if (outcome.empty() && edit.is_only_time) {
                Lifecycle unbroken(entry, dtype, layout, device);
                unbroken.step((frozen ? 4 : 1) + 6);
                if (!same_bits(run.everything(), unbroken.everything())) outcome = "<other bits>";
              }
            } catch (const InvalidArgument& error) {
              outcome = error.what();  // such an optimizer cannot be made
              ++count.impossible;
            }
            if (outcome.empty()) {
              ++count.equal;
            } else if (outcome[0] != '<') {
              ++count.refused;
            } else {
              count.wrong.push_back(cell + ": " + outcome);
            }
          }
        }
      }
    }
  }
  return count;
}

}  // namespace pacer::testing
