// What pacer-bench can measure: each folder here has a function that says what its subcommand is called,
// which options it has and what it does.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "support/command_line.h"  // of examples/

namespace bench {

namespace po = boost::program_options;

struct Subcommand {
  std::string name;
  std::string summary;  // in the table of all subcommands
  std::string about;    // what its help says before the options; whole lines
  std::function<int(const examples::OptionValues& given)> run;  // returns the exit code
  po::options_description options = examples::make_options();
  const char* without_dashes = nullptr;  // options, separated by commas, whose values may be given as words
};

// Values of options: a text, and a whole number, which number_in reads and which must be at least `least`.
inline auto* word(const char* name) { return po::value<std::string>()->value_name(name); }
inline auto* whole_number() { return po::value<int64_t>()->value_name("N"); }
inline auto* whole_number(int64_t otherwise) { return whole_number()->default_value(otherwise); }
inline int64_t number_in(const examples::OptionValues& given, const std::string& name, int64_t least = 1) {
  constexpr int64_t kMost = 1'000'000'000'000;
  return examples::value_in<int64_t>(given, name, least, kMost);
}

// clang-format off
namespace kernels { Subcommand subcommand(); }
namespace cpu { Subcommand subcommand(); }
namespace session { Subcommand subcommand(); }
namespace checkpoint { Subcommand subcommand(); }
namespace overlap { Subcommand subcommand(); }
namespace onebit { Subcommand subcommand(); }
namespace sharding { Subcommand subcommand(); }
namespace lora { Subcommand subcommand(); }
namespace nf4 { Subcommand subcommand(); }
namespace paging { Subcommand subcommand(); }
namespace pipeline { Subcommand subcommand(); }
namespace muon { Subcommand subcommand(); }
namespace layers { Subcommand subcommand(); }
namespace rows { Subcommand subcommand(); }
namespace lm { Subcommand subcommand(); }
namespace loss { Subcommand subcommand(); }
// clang-format on

}  // namespace bench
