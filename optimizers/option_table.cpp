#include <pacer/optimizers/option_table.h>

#include <sstream>

#include <pacer/optimizers/detail/option_visitors.h>

namespace pacer {
namespace {

template <class Number>
std::string text_of(Number number) {
  std::ostringstream text;
  text << std::boolalpha << number;
  return text.str();
}
std::string text_of(const detail::Betas& betas) {
  return text_of(std::get<0>(betas)) + ", " + text_of(std::get<1>(betas));
}
template <class Number>
std::string text_of(const std::optional<Number>& number) {
  return number ? text_of(*number) : "unset";
}
std::string text_of(MasterWeights value) {
  static const char* const kNames[] = {"automatic", "fp32", "remainder", "none"};
  return kNames[static_cast<size_t>(value)];
}
std::string text_of(Rounding value) { return value == Rounding::nearest ? "nearest" : "stochastic"; }
std::string text_of(kernels::ScaleNorm value) { return value == kernels::ScaleNorm::rms ? "rms" : "l1"; }

const char* type_of(bool) { return "bool"; }
const char* type_of(double) { return "double"; }
const char* type_of(int64_t) { return "int64_t"; }
const char* type_of(uint64_t) { return "uint64_t"; }
const char* type_of(const detail::Betas&) { return "tuple<double, double>"; }
const char* type_of(const std::optional<double>&) { return "optional<double>"; }
const char* type_of(const std::optional<int64_t>&) { return "optional<int64_t>"; }
const char* type_of(MasterWeights) { return "MasterWeights"; }
const char* type_of(Rounding) { return "Rounding"; }
const char* type_of(kernels::ScaleNorm) { return "ScaleNorm"; }

}  // namespace

template <class Options>
std::vector<OptionDescription> describe_options() {
  std::vector<OptionDescription> all;
  const Options defaults;
  detail::visit_options(defaults, [&](const detail::OptionField& field, const auto& value) {
    all.push_back({field.name, type_of(value), field.help, text_of(value)});
  });
  return all;
}

template <class Options>
std::string option_help(const std::string& name) {
  for (const OptionDescription& option : describe_options<Options>()) {
    if (option.name == name) return option.meaning;
  }
  throw InvalidArgument(detail::concatenate("these options have no \"", name, "\""));
}

std::string markdown_table(const std::vector<OptionDescription>& options) {
  std::string table = "| type | name | meaning | default |\n| --- | --- | --- | --- |\n";
  for (const OptionDescription& option : options) {
    table += "| `" + option.type + "` | `" + option.name + "` | " + option.meaning + " | " +
             option.default_value + " |\n";
  }
  return table;
}

template std::vector<OptionDescription> describe_options<FusedAdamOptions>();
template std::vector<OptionDescription> describe_options<FusedAdamWOptions>();
template std::vector<OptionDescription> describe_options<FusedLambOptions>();
template std::vector<OptionDescription> describe_options<OneBitAdamOptions>();
template std::vector<OptionDescription> describe_options<OneBitLambOptions>();
template std::string option_help<FusedAdamOptions>(const std::string&);
template std::string option_help<FusedAdamWOptions>(const std::string&);
template std::string option_help<FusedLambOptions>(const std::string&);
template std::string option_help<OneBitAdamOptions>(const std::string&);
template std::string option_help<OneBitLambOptions>(const std::string&);

}  // namespace pacer
