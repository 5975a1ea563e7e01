#include <pacer/optimizers/option_table.h>

#include <sstream>

#include <pacer/optimizers/detail/option_visitors.h>

namespace pacer {
namespace {

template <class Value>
std::string text_of(const Value& value) {
  if constexpr (detail::kIsOptional<Value>) {
    return value ? text_of(*value) : "unset";
  } else if constexpr (std::is_same_v<Value, detail::Betas>) {
    return text_of(std::get<0>(value)) + ", " + text_of(std::get<1>(value));
  } else if constexpr (std::is_enum_v<Value>) {
    return detail::choices(value).at(static_cast<size_t>(value));
  } else {
    std::ostringstream text;
    text << std::boolalpha << value;
    return text.str();
  }
}

const char* type_of(bool) { return "bool"; }
const char* type_of(double) { return "double"; }
const char* type_of(int64_t) { return "int64_t"; }
const char* type_of(uint64_t) { return "uint64_t"; }
const char* type_of(const detail::Betas&) { return "tuple<double, double>"; }
const char* type_of(const std::optional<double>&) { return "optional<double>"; }
const char* type_of(const std::optional<int64_t>&) { return "optional<int64_t>"; }
const char* type_of(MasterWeights) { return "MasterWeights"; }
const char* type_of(Rounding) { return "Rounding"; }
const char* type_of(ScaleNorm) { return "ScaleNorm"; }

}  // namespace

template <class Options>
std::vector<OptionDescription> describe_options() {
  std::vector<OptionDescription> all;
  const Options defaults;
  const auto describe = [&](const detail::OptionField& field, const auto& value) {
    all.push_back({field.name, type_of(value), field.help, text_of(value)});
  };
  detail::visit_options(describe, defaults);
  return all;
}

std::string option_help(const std::vector<OptionDescription>& options, const std::string& name) {
  for (const OptionDescription& option : options) {
    if (option.name == name) return option.meaning;
  }
  throw InvalidArgument(detail::concatenate("these options have no \"", name, "\""));
}

std::string markdown_table(const std::vector<OptionDescription>& options) {
  std::string table = "| name | type | meaning | default |\n| --- | --- | --- | --- |\n";
  for (const OptionDescription& option : options) {
    table += "| `" + option.name + "` | `" + option.type + "` | " + option.meaning + " | " +
             option.default_value + " |\n";
  }
  return table;
}

template std::vector<OptionDescription> describe_options<FusedAdamOptions>();
template std::vector<OptionDescription> describe_options<FusedAdamWOptions>();
template std::vector<OptionDescription> describe_options<FusedLambOptions>();
template std::vector<OptionDescription> describe_options<OneBitAdamOptions>();
template std::vector<OptionDescription> describe_options<OneBitLambOptions>();

}  // namespace pacer
