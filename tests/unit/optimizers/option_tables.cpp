// The tables of options in docs/ are those that the code makes of its fields.
#include "support/catch.h"

#include <cstdio>
#include <fstream>
#include <sstream>

#include <pacer/optimizers/option_table.h>

#include "support/optimizers/optimizers.h"
#include "support/session/registry.h"

namespace pacer::testing {
namespace {

std::string page(const std::string& name) {
  const std::string here = __FILE__;
  std::ifstream file(here.substr(0, here.rfind("tests/unit/")) + "docs/" + name);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// Prints the table that is wanted where the page has another.
template <class Options>
bool is_in_page(const std::string& name) {
  const std::string table = markdown_table(describe_options<Options>());
  const bool found = contains(page(name), table);
  if (!found) std::printf("docs/%s should have this table:\n%s", name.c_str(), table.c_str());
  return found;
}

}  // namespace

TEST_CASE("the tables of options in the docs are made of the fields", "[docs]") {
  if (page("fused-adam.md").empty()) PACER_SKIP("the sources are not here");
  CHECK(is_in_page<FusedAdamWOptions>("fused-adam.md"));
  CHECK(is_in_page<FusedLambOptions>("fused-lamb.md"));
  CHECK(is_in_page<OneBitAdamOptions>("onebit-adam.md"));
  CHECK(is_in_page<OneBitLambOptions>("onebit-lamb.md"));
}

TEST_CASE("options are described by name, type, meaning and default", "[fused_adam]") {
  const auto adam = describe_options<FusedAdamOptions>(), onebit = describe_options<OneBitAdamOptions>();
  CHECK(adam.size() + 1 == describe_options<FusedLambOptions>().size() - 1);  // amsgrad against three of LAMB
  CHECK((adam[0].name == "lr" && adam[0].type == "double" && adam[0].default_value == "0.001"));
  CHECK((adam[1].default_value == "0.9, 0.999" && adam[3].default_value == "0"));
  CHECK(option_help<OneBitAdamOptions>("block_scales") != "");
  CHECK(contains(refusal([] { option_help<OneBitAdamOptions>("amsgrad"); }), "amsgrad"));
  for (const OptionDescription& option : onebit) CHECK(option.meaning.size() > 10);
}

}  // namespace pacer::testing
