#include <pacer/modules/detail/operator_list.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <ATen/core/enum_tag.h>
#include <ATen/core/jit_type.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/replay_memory.h>

namespace pacer::detail {
namespace {

c10::OperatorName operator_name(const std::string& name) {
  const size_t colons = name.find("::");
  require(colons != std::string::npos && colons > 0 && colons + 2 < name.size(), "'", name,
          "' is no name of an operator to keep; write namespace::name or namespace::name.overload, as in "
          "aten::mm and aten::add.Tensor");
  const size_t dot = name.find('.', colons);
  return {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)};
}

// The overloads of a name that has them, for an error.
std::string overloads_of(const std::string& name) {
  std::vector<std::string> found;
  for (const c10::OperatorName& known : c10::Dispatcher::singleton().getAllOpNames()) {
    if (known.name == name) found.push_back(c10::toString(known));
  }
  if (found.empty()) return "; write namespace::name or namespace::name.overload, as in aten::mm";
  std::sort(found.begin(), found.end());
  std::string text = "; its overloads are";
  for (const std::string& overload : found) text += " " + overload;
  return text;
}

// A tensor, tensors, or what describes them.
bool is_tensor(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  return type.kind() == c10::TypeKind::ListType && type.containedType(0)->kind() == c10::TypeKind::TensorType;
}
bool is_number(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::NumberType:
      return true;
    default:
      return false;
  }
}

// Operators that give memory of their argument, and whose schemas do not say so.
std::vector<c10::OperatorName> unmarked_views() {
  return {
      {"aten::_unsafe_view", ""}, {"aten::unsafe_split", "Tensor"}, {"aten::unsafe_split_with_sizes", ""}};
}

void check_schema(const std::string& name, const c10::OperatorHandle& handle) {
  const c10::FunctionSchema& schema = handle.schema();
  const auto has_alias = [](const c10::Argument& argument) { return argument.alias_info() != nullptr; };
  require(!schema.is_mutable(), name, " changes an argument in place, so its result cannot be kept");
  const auto views = unmarked_views();
  require(std::find(views.begin(), views.end(), handle.operator_name()) == views.end() &&
              std::none_of(schema.arguments().begin(), schema.arguments().end(), has_alias) &&
              std::none_of(schema.returns().begin(), schema.returns().end(), has_alias),
          name,
          " gives a view of its argument, which costs nothing to make again; leave it out of what is kept");
  bool any = false, all = true;
  for (const c10::Argument& result : schema.returns()) {
    any = any || is_tensor(*result.type());
    all = all && (is_tensor(*result.type()) || is_number(*result.type()));
  }
  require(any && all, name,
          " gives no tensor, or something beside tensors and numbers, so it cannot be kept");
  require(!handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd), name,
          " is made of other operators, which run in its place; keep those (aten::linear and aten::matmul "
          "are made of aten::addmm, aten::mm and aten::bmm)");
}

std::optional<size_t> log_sumexp_of(const c10::FunctionSchema& schema) {
  const auto index = schema.argumentIndexWithName("compute_log_sumexp");
  return index ? std::optional<size_t>(static_cast<size_t>(*index)) : std::nullopt;
}

// Registrations last as long as the process: a kernel that could go away would have to wait for regions on all threads.
class Registrations {
 public:
  void add(const c10::OperatorHandle& handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& dispatcher = c10::Dispatcher::singleton();
    if (!pass_through_) {
      require<Error>(!dispatcher.hasBackendFallbackForDispatchKey(kKeepingKey),
                     "another library uses the dispatch key ", c10::toString(kKeepingKey),
                     ", with which operators are kept; recompute without KeptOperators");
      pass_through_.emplace(dispatcher.registerFallback(kKeepingKey, c10::KernelFunction::makeFallthrough(),
                                                        "pacer: operators that are not kept"));
    }
    for (const c10::OperatorName& name : unmarked_views()) add_kernel<&ReplayMemory::run_alias>(name);
    add_kernel<&ReplayMemory::run_addition>({"aten::add_", "Tensor"});
    add_kernel<&ReplayMemory::run_kept>(handle.operator_name());
  }

 private:
  template <c10::KernelFunction::BoxedKernelFunction_withDispatchKeys* kKernel>
  void add_kernel(const c10::OperatorName& name) {
    if (kernels_.count(name) != 0) return;
    kernels_.emplace(name, c10::Dispatcher::singleton().registerImpl(
                               name, kKeepingKey, c10::KernelFunction::makeFromBoxedFunction<kKernel>(),
                               std::nullopt, nullptr, "pacer: results that regions keep"));
  }

  std::mutex mutex_;
  std::optional<c10::RegistrationHandleRAII> pass_through_;
  std::unordered_map<c10::OperatorName, c10::RegistrationHandleRAII> kernels_;
};

Registrations& registrations() {
  static auto* const all = new Registrations;  // the dispatcher may end first
  return *all;
}

}  // namespace

std::shared_ptr<const OperatorList> checked_operators(const std::vector<std::string>& names) {
  if (names.empty()) return nullptr;
  auto list = std::make_shared<OperatorList>();
  for (const std::string& name : names) {
    const c10::OperatorName wanted = operator_name(name);
    const auto handle = c10::Dispatcher::singleton().findSchema(wanted);
    require(handle.has_value(), "there is no operator ", name, " to keep", overloads_of(wanted.name));
    check_schema(name, *handle);
    list->names.push_back(name);
    list->operators.push_back(
        {*handle, log_sumexp_of(handle->schema()), handle->hasTag(at::Tag::nondeterministic_seeded)});
  }
  for (const KeptOperator& kept : list->operators) registrations().add(kept.handle);
  return list;
}

}  // namespace pacer::detail
