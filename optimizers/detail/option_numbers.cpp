#include <pacer/optimizers/detail/option_numbers.h>

#include <string_view>

#include <pacer/core/error.h>
#include <pacer/files/number_text.h>

namespace pacer::detail {

void NumberFacts::operator()(const char* name, double value) {
  const bool is_rate = std::string_view(name) == "lr";
  facts_.push_back({is_rate ? concatenate("learning rate of parameter group ", group_)
                            : concatenate("optimizer option group/", group_, '/', name),
                    exact_text(value)});
}

void NumberFacts::operator()(const char* name, int64_t value) {
  facts_.push_back({concatenate("optimizer option group/", group_, '/', name), std::to_string(value)});
}

}  // namespace pacer::detail
