#include <pacer/optimizers/detail/option_numbers.h>

#include <array>
#include <charconv>
#include <string_view>

#include <pacer/core/error.h>

namespace pacer::detail {

void NumberFacts::operator()(const char* name, double value) {
  std::array<char, 32> text;  // as few digits as tell it from all other numbers, whatever the locale says
  char* const end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  const bool is_rate = std::string_view(name) == "lr";
  facts_.push_back({is_rate ? concatenate("learning rate of parameter group ", group_)
                            : concatenate("optimizer option group/", group_, '/', name),
                    std::string(text.data(), end)});
}

void NumberFacts::operator()(const char* name, int64_t value) {
  facts_.push_back({concatenate("optimizer option group/", group_, '/', name), std::to_string(value)});
}

}  // namespace pacer::detail
