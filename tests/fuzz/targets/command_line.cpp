// The command line and INI files of the examples: the first line of the input are arguments, the rest is the
// file of --config.
#include <cmath>
#include <cstdio>
#include <iostream>
#include <sstream>

#include "fuzz/harness.h"
#include "support/command_line.h"
#include "support/temporary_folder.h"

namespace pacer::fuzz {
namespace {

namespace po = boost::program_options;

po::options_description known_options() {
  auto known = examples::make_options();
  known.add_options()                                                                                   //
      ("rate", po::value<double>()->default_value(0.5), "a number")                                     //
      ("steps", po::value<int64_t>()->default_value(10), "a count")                                     //
      ("ranks", po::value<int>()->default_value(1), "a small count")                                    //
      ("device", po::value<std::string>()->value_name("cpu|cuda")->default_value("cpu"), "one of two")  //
      ("output", po::value<std::string>()->default_value("out"), "a file")                              //
      ("verbose", po::bool_switch(), "a switch");
  return known;
}

struct Options {
  double rate;
  int64_t steps;
  int ranks;
  std::string device, output;
  bool verbose;
};

// What was typed, and checked as programs do; nothing where only help was asked for.
std::optional<Options> read(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "folder/program");
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  const auto given = examples::read_command_line(static_cast<int>(arguments.size()), pointers.data(),
                                                 "About.\n", known_options());
  if (!given) return std::nullopt;
  Options options;
  options.rate = examples::value_in<double>(*given, "rate", 0, 1);
  options.steps = examples::value_in<int64_t>(*given, "steps", 0, int64_t{1} << 62);
  options.ranks = examples::value_in<int>(*given, "ranks", 1, 1024);
  options.device = examples::choice_of<std::string>(*given, "device", {{"cpu", "cpu"}, {"cuda", "cuda"}});
  options.output = (*given)["output"].as<std::string>();
  options.verbose = (*given)["verbose"].as<bool>();
  return options;
}

std::string ini_of(const Options& options) {
  std::ostringstream text;
  text.precision(17);
  text << "rate = " << options.rate << "\nsteps = " << options.steps << "\nranks = " << options.ranks
       << "\ndevice = " << options.device << "\nverbose = " << (options.verbose ? "true" : "false") << '\n';
  return text.str();
}

std::string file_with(const std::string& text) {
  static const testing::TemporaryFolder folder;
  const std::string path = folder.path("a.ini");
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  std::fwrite(text.data(), 1, text.size(), file);
  std::fclose(file);
  return path;
}

void check(const Options& options) {
  demand(options.rate >= 0 && options.rate <= 1 && std::isfinite(options.rate) && options.steps >= 0 &&
             options.ranks >= 1 && options.ranks <= 1024,
         "a value is out of range");
  const Options again = *read({"--config", file_with(ini_of(options))});
  demand(ini_of(again) == ini_of(options), "options differ after they were written and read again");
}

// Help goes nowhere.
class NoOutput {
 public:
  NoOutput() : before_(std::cout.rdbuf(nullptr)) {}
  ~NoOutput() {
    std::cout.rdbuf(before_);
    std::cout.clear();
  }

 private:
  std::streambuf* const before_;
};

}  // namespace

std::vector<std::string> seeds() {
  return {"--rate=0.25 --steps 5 -h",
          "--device=cuda --verbose --output x\nranks = 4\n",
          "\n# a comment\nrate = 1e-3\nsteps = 7 # another\nverbose = true\n[section]\nx = 1\n",
          "--help-all",
          "--print-config --ranks 3",
          "--completion bash",
          "--rate nan",
          "--steps -0",
          "\nlearning" + std::string(100000, 'x') + " = 1\n",
          "--" + std::string(100000, 'r')};
}

}  // namespace pacer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pacer;
  const std::string text = fuzz::text_of(data, size);
  const size_t end = std::min(text.find('\n'), text.size());
  std::vector<std::string> arguments;
  std::istringstream words(text.substr(0, end));
  for (std::string word; words >> word;) {
    // Arguments have no NUL; a file that the input names could be any of this machine.
    if (word.find('\0') == std::string::npos && word.rfind("--config", 0) != 0) arguments.push_back(word);
  }
  if (end < text.size()) {
    arguments.insert(arguments.begin(), {"--config", fuzz::file_with(text.substr(end + 1))});
  }
  const fuzz::NoOutput no_output;
  std::optional<fuzz::Options> options;
  // Boost keeps each option several times.
  if (fuzz::accepts(64 * size, [&] { options = fuzz::read(arguments); }) && options) fuzz::check(*options);
  return 0;
}
