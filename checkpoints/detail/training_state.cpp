#include <pacer/checkpoints/detail/training_state.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>

#include <pacer/checkpoints/detail/frozen_weights.h>
#include <pacer/checkpoints/detail/merged_weights.h>
#include <pacer/checkpoints/detail/shared_memory.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/deferred_storage.h>
#include <pacer/device/detail/random_state.h>
#include <pacer/files/json_scanner.h>
#include <pacer/hooks/detail/torch_optimizer_state.h>
#include <pacer/hooks/sharded_state.h>

namespace pacer::detail {
namespace {

constexpr const char* kCudaRandom = "random/cuda";
// Of a step, over all ranks. Checkpoints of before lack it; it is told of, not restored.
constexpr const char* kMicroBatches = "progress/micro_batches";
constexpr const char* kAdapters = "adapters";  // active_adapters, where the model has some
constexpr const char* kNextFactor = "hook/learning_rate/next_factor";

std::string hook_prefix(const Hook& hook) { return "hook/" + hook.hook_name() + "/"; }

// What hooks keep for each parameter is among the optimizer's state, as PARAMETER/hook.NAME.
std::string parameter_suffix(const Hook& hook) { return "/" + std::string(kFieldOfHook) + hook.hook_name(); }

void add_parameter_states(const SessionParts& parts, NamedTensors& optimizer) {
  for (const auto& hook : parts.hooks()) {
    for (const auto& [name, tensor] : hook->parameter_state())
      optimizer.emplace(name + parameter_suffix(*hook), tensor);
  }
}

// The other way round: what one hook has there, by the parameters' names.
NamedTensors take_parameter_state(const Hook& hook, NamedTensors& optimizer) {
  const std::string suffix = parameter_suffix(hook);
  NamedTensors own;
  for (auto item = optimizer.begin(); item != optimizer.end();) {
    const std::string& name = item->first;
    const bool is_own =
        name.size() > suffix.size() && name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
    if (is_own) own.emplace(name.substr(0, name.size() - suffix.size()), item->second);
    item = is_own ? optimizer.erase(item) : std::next(item);
  }
  return own;
}

// Of the step that comes next, over all ranks.
int64_t micro_batches_at(const SessionParts& parts, const Progress& progress) {
  return parts.micro_steps_of(progress) * parts.data_ranks().world_size();
}

NamedTensors session_tensors(const SessionParts& parts) {
  NamedTensors tensors;
  tensors["progress/step"] = number_tensor(parts.progress.step);
  tensors["progress/tokens"] = number_tensor(parts.progress.tokens);
  tensors[kMicroBatches] = number_tensor(micro_batches_at(parts, parts.progress));
  const RandomState random = get_random_state(parts.device());
  tensors["random/cpu"] = random.cpu;
  if (random.cuda.defined()) tensors[kCudaRandom] = random.cuda;
  if (const std::string active = active_adapters(parts.model()); !active.empty()) {
    const at::Tensor bytes = at::empty({static_cast<int64_t>(active.size())}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), active.data(), active.size());
    tensors[kAdapters] = bytes;
  }
  if (parts.has_guard()) tensors["guard/skipped_steps"] = number_tensor(parts.read_guard().skipped_steps);
  for (const auto& hook : parts.hooks()) {
    NamedTensors own;
    hook->save(own);
    for (const auto& [key, tensor] : own) tensors[hook_prefix(*hook) + key] = tensor;
  }
  return tensors;
}

// The first name that only `a` has; null if there is none.
const std::string* first_only_in(const NamedTensors& a, const NamedTensors& b) {
  for (const auto& item : a) {
    if (b.count(item.first) == 0) return &item.first;
  }
  return nullptr;
}

void check_model(const NamedTensors& own, const NamedTensors& saved) {
  const std::string* missing = first_only_in(own, saved);
  const std::string* left_over = first_only_in(saved, own);
  require(!missing || !left_over, "the checkpoint has \"", left_over ? *left_over : "", "\" but no \"",
          missing ? *missing : "",
          "\", and this model has it the other way round; build the model that was saved");
  require(!missing, "the checkpoint has no \"", missing ? *missing : "",
          "\", which this model has; build the model that was saved");
  require(!left_over, "the checkpoint has \"", left_over ? *left_over : "",
          "\", which this model does not; build the model that was saved");
  std::unordered_map<const void*, std::string> name_of;
  for (const auto& [name, tensor] : own) {
    const at::Tensor& value = saved.at(name);
    require(value.scalar_type() == tensor.scalar_type() && value.sizes() == tensor.sizes(), "\"", name,
            "\" is ", value.scalar_type(), " of shape ", value.sizes(), " in the checkpoint, but ",
            tensor.scalar_type(), " of shape ", tensor.sizes(), " in this model");
    const auto [twin, is_first] = name_of.emplace(tensor.unsafeGetTensorImpl(), name);
    require(is_first || saved.at(twin->second).equal(value), "\"", twin->second, "\" and \"", name,
            "\" are one tensor in this model, but differ in the checkpoint");
  }
  const std::string conflict = conflict_in_memory(own, saved);
  require(conflict.empty(), conflict, " in the checkpoint; build the model that was saved");
}

int64_t count_from(const NamedTensors& saved, const std::string& name) {
  const auto count = require_number<int64_t>(saved, name);
  require(count >= 0, "\"", name, "\" of the checkpoint is ", count, ", which is no count");
  return count;
}

Progress progress_of(const SessionParts& parts, const NamedTensors& saved) {
  Progress progress;
  progress.step = count_from(saved, "progress/step");
  progress.tokens = count_from(saved, "progress/tokens");
  progress.micro_steps = parts.micro_steps_of(progress);
  return progress;
}

// What resumes with steps of another size, in a sentence; empty where they are alike.
std::string note_on_micro_batches(const SessionParts& parts, const NamedTensors& saved) {
  if (saved.count(kMicroBatches) == 0) return "";
  const int64_t now = micro_batches_at(parts, progress_of(parts, saved));
  const auto before = require_number<int64_t>(saved, kMicroBatches);
  if (now == before) return "";
  return concatenate("the steps of the checkpoint took ", before,
                     " micro-batches over all ranks, those of this run take ", now,
                     "; where micro-batches have the same size, each step sees ",
                     static_cast<double>(now) / static_cast<double>(before),
                     " times as many examples, which the learning rate does not follow");
}

// What active_adapters wrote: of each layer the names of its active adapters, with tabs between them.
std::map<std::string, std::string> active_by_layer(const at::Tensor& bytes) {
  const std::string text(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  std::map<std::string, std::string> active;
  for (size_t at = 0, end = 0; at < text.size(); at = end + 1) {
    end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    const size_t tab = std::min(line.find('\t'), line.size());
    active[line.substr(0, tab)] = tab < line.size() ? line.substr(tab + 1) : "";
  }
  return active;
}

// The names as a caller writes them: "a", or {"a", "b"}.
std::string quoted_adapters(const std::string& names) {
  if (names.find('\t') == std::string::npos) return quote_for_message(names);
  std::string text;
  for (size_t at = 0, end = 0; at <= names.size(); at = end + 1) {
    end = std::min(names.find('\t', at), names.size());
    text += (text.empty() ? "{" : ", ") + quote_for_message(names.substr(at, end - at));
  }
  return text + '}';
}

// Which adapters are active decides what a step trains, and is in no tensor of the model.
void check_adapters(const NamedTensors& own, const NamedTensors& saved) {
  const auto mine = own.find(kAdapters), its = saved.find(kAdapters);
  if (mine == own.end() || its == saved.end() || mine->second.equal(its->second)) return;
  const auto wanted = active_by_layer(its->second);
  for (const auto& [layer, names] : active_by_layer(mine->second)) {
    const auto found = wanted.find(layer);
    if (found == wanted.end() || found->second == names) continue;
    const bool are_several = found->second.find('\t') != std::string::npos;
    const std::string saved_names = quoted_adapters(found->second);
    throw InvalidArgument(concatenate(
        "the checkpoint was saved while the active adapter of ", quote_for_message(layer), " was ",
        saved_names, ", which in this model is ", quoted_adapters(names), "; call ",
        are_several ? "set_adapters(model, " : "set_adapter(model, ", saved_names, ") and resume then"));
  }
}

// Both sides' names must be the same, but for the random states, which the devices decide.
void check_session(NamedTensors own, NamedTensors saved) {
  constexpr const char* kAdvice = "; resume with the hooks that were in use when it was saved";
  for (NamedTensors* side : {&own, &saved}) {
    side->erase(kCudaRandom);
    side->erase(kMicroBatches);
    side->erase(kAdapters);  // older checkpoints have neither
    // One for the hook, and one for each group with a schedule of its own, which the LearningRate compares itself.
    for (auto item = side->lower_bound(kNextFactor);
         item != side->end() && item->first.rfind(kNextFactor, 0) == 0;) {
      item = side->erase(item);
    }
  }
  const std::string* missing = first_only_in(own, saved);
  require(!missing, "the checkpoint has no \"", missing ? *missing : "", "\" of the Session", kAdvice);
  const std::string* left_over = first_only_in(saved, own);
  require(!left_over, "the checkpoint has \"", left_over ? *left_over : "",
          "\", of which this Session knows nothing", kAdvice);
}

// Puts the Session's own part in force; may throw half-way.
void apply_session(SessionParts& parts, const NamedTensors& saved) {
  const Progress progress = progress_of(parts, saved);
  RandomState random;
  random.cpu = require_tensor(saved, "random/cpu");
  if (const auto cuda = saved.find(kCudaRandom); cuda != saved.end()) random.cuda = cuda->second;
  set_random_state(parts.device(), random);
  if (parts.has_guard()) {
    kernels::GradientCheck check = parts.read_guard();
    check.skipped_steps = count_from(saved, "guard/skipped_steps");
    parts.guard(SessionParts::Look::any_time)->write(check);
  }
  parts.progress = progress;
  for (const auto& hook : parts.hooks()) {
    const std::string prefix = hook_prefix(*hook);
    NamedTensors own;
    for (auto item = saved.lower_bound(prefix);
         item != saved.end() && item->first.compare(0, prefix.size(), prefix) == 0; ++item) {
      own.emplace(item->first.substr(prefix.size()), item->second);
    }
    hook->load(own);
  }
}

std::function<void()> prepare_optimizer(SessionParts& parts, const TrainingState& saved) {
  try {
    return parts.session_optimizer()
               ? parts.session_optimizer()->prepare_import(saved.optimizer, saved.rank_optimizer)
               : prepare_torch_state(parts.optimizer(), parts.model(), saved.optimizer);
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    if (text.find("\"group/") == std::string::npos) throw;
    // Options by other names, or in other numbers, are another optimizer's.
    const torch::optim::Optimizer& optimizer = parts.optimizer();
    throw InvalidArgument(concatenate(text, "; was it saved with another optimizer than ",
                                      c10::demangle(typeid(optimizer).name()),
                                      ", or with other groups? Resume with what was saved"));
  }
}

// Copies, since hooks may share their memory. What an earlier load owes comes first.
std::shared_ptr<const NamedTensors> session_before(SessionParts& parts) {
  put_session_back(parts);
  return std::make_shared<const NamedTensors>(copies_of(session_tensors(parts)));
}

}  // namespace

void put_session_back(SessionParts& parts) {
  if (!parts.to_put_back) return;
  apply_session(parts, *parts.to_put_back);
  parts.to_put_back.reset();
}

TrainingState export_state(SessionParts& parts) {
  put_session_back(parts);
  // Parameters may have been replaced by others since their names were last looked at.
  if (parts.session_optimizer()) parts.session_optimizer()->name_parameters(parts.model().named_parameters());
  TrainingState state;
  state.model = without_merged(parts.model(), saved_model(parts));
  state.optimizer = parts.session_optimizer() ? parts.session_optimizer()->export_state()
                                              : export_torch_state(parts.optimizer(), parts.model());
  add_parameter_states(parts, state.optimizer);
  if (parts.session_optimizer()) state.rank_optimizer = parts.session_optimizer()->export_rank_state();
  state.session = session_tensors(parts);
  return state;
}

NamedTensors session_of_other_run(const SessionParts& parts, NamedTensors saved, bool same_ranks,
                                  bool had_this_rank) {
  const NamedTensors own = session_tensors(parts);
  const auto begins = [](const NamedTensors& tensors, const std::string& prefix) {
    const auto item = tensors.lower_bound(prefix);
    return item != tensors.end() && item->first.compare(0, prefix.size(), prefix) == 0;
  };
  const std::string buckets = "hook/data_parallel/", random = "random/";
  const auto keep_own = [&](const std::string& prefix) {
    while (begins(saved, prefix)) saved.erase(saved.lower_bound(prefix));
    for (auto item = own.lower_bound(prefix);
         item != own.end() && item->first.compare(0, prefix.size(), prefix) == 0; ++item) {
      saved.insert(*item);
    }
  };
  if (!same_ranks || begins(own, buckets) != begins(saved, buckets)) keep_own(buckets);
  // A Pipeline has a guard in any case, and clipping has state where it is by the norm of the step before.
  for (const std::string prefix : {"guard/", "hook/gradient_clipping/"}) {
    if (begins(own, prefix) != begins(saved, prefix)) keep_own(prefix);
  }
  if (!had_this_rank) keep_own(random);
  return saved;
}

StateImport::StateImport(SessionParts& parts, TrainingState state)
    : parts_(parts), before_(session_before(parts)) {
  const at::NoGradGuard no_grad;
  require_unmerged(parts.model(), "");
  check_adapters(*before_, state.session);
  const NamedTensors own = saved_model(parts);
  check_model(own, state.model);
  check_writable(own);
  for (const auto& [name, tensor] : own) values_.emplace_back(tensor, state.model.at(name));
  check_session(*before_, state.session);
  for (const auto& hook : parts.hooks()) {
    put_in_force_.push_back(hook->prepare_parameter_state(take_parameter_state(*hook, state.optimizer)));
  }
  put_in_force_.push_back(prepare_optimizer(parts, state));
  micro_batches_note_ = note_on_micro_batches(parts, state.session);
  random_state_note_ = note_on_random_state(!parts.device().is_cpu(), state.session.count(kCudaRandom) != 0);
  try {
    apply_session(parts, state.session);
  } catch (...) {
    go_back();
    throw;
  }
}

StateImport::~StateImport() {
  if (!committed_) go_back();
}

void StateImport::go_back() noexcept {
  parts_.to_put_back = before_;
  try {
    put_session_back(parts_);
  } catch (const std::exception& /*error*/) {
    // Whoever needs the Session next tries again, and hears of it.
  }
}

void StateImport::commit() {
  const at::NoGradGuard no_grad;
  for (const auto& put : put_in_force_) put();
  committed_ = true;
  for (const auto& [own, saved] : values_) {
    if (is_deferred(own)) {
      deferred_value(own) = saved;  // until it has memory
    } else {
      own.copy_(saved);
    }
  }
}

void import_state(SessionParts& parts, const TrainingState& state) {
  TrainingState copies = state;
  copies.optimizer = copies_of(state.optimizer);
  StateImport(parts, std::move(copies)).commit();
}

}  // namespace pacer::detail
