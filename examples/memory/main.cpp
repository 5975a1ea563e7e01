// pacer-memory: what training takes on each rank beside activations, for every way to share it out. Exit
// codes: 0 for success, 2 for input that cannot work.
#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include <boost/program_options.hpp>

#include <pacer/parallel/training_memory.h>

#include "support/command_line.h"
#include "support/program.h"

namespace {

namespace po = boost::program_options;

struct Kind {
  at::ScalarType dtype;
  pacer::MasterWeights master;
};
const std::vector<std::pair<std::string, Kind>> kKinds = {
    {"fp32", {at::kFloat, pacer::MasterWeights::automatic}},
    {"bf16", {at::kBFloat16, pacer::MasterWeights::remainder}},
    {"bf16-24", {at::kBFloat16, pacer::MasterWeights::remainder_8}},
    {"bf16-master", {at::kBFloat16, pacer::MasterWeights::fp32}},
    {"bf16-only", {at::kBFloat16, pacer::MasterWeights::none}},
    {"fp16", {at::kHalf, pacer::MasterWeights::fp32}}};

void print_row(const char* name, const pacer::TrainingMemory& memory) {
  std::printf("%-34s", name);
  for (const int64_t bytes :
       {memory.weights, memory.gradients, memory.moments, memory.exact, memory.units, memory.total()}) {
    std::printf(" %10.3f", static_cast<double>(bytes) / 1e9);
  }
  std::printf("\n");
}

int run(int argument_count, char** arguments) {
  po::options_description known = examples::make_options();
  known.add_options()  //
      ("parameters", po::value<double>()->value_name("N")->default_value(1e9, "1e9"),
       "trained elements, 7e9 for example")                                                      //
      ("ranks", po::value<int64_t>()->value_name("W")->default_value(8), "that train together")  //
      ("dtype",
       po::value<std::string>()
           ->value_name("fp32|bf16|bf16-24|bf16-master|bf16-only|fp16")
           ->default_value("bf16"),
       "of weights and gradients; bf16 has 16-bit remainders, bf16-24 has 8-bit ones, bf16-master and fp16 "
       "have fp32 copies")                                                                           //
      ("state-bits", po::value<int64_t>()->value_name("32|8")->default_value(32), "of the moments")  //
      ("orthogonalized", po::value<double>()->value_name("N")->default_value(0, "0"),
       "of the elements that are in matrices of Muon, with one moment instead of two")  //
      ("largest-released", po::value<double>()->value_name("N")->default_value(0, "0"),
       "elements of the largest parameter, for a row with GradientRelease, which is for one rank")  //
      ("unit-mib", po::value<int64_t>()->value_name("MIB")->default_value(25),
       "ShardsOptions::unit_bytes")  //
      ("blocks", po::value<int64_t>()->value_name("N")->default_value(32),
       "of equal size, for parts of parameters")  //
      ("outside", po::value<double>()->value_name("N")->default_value(0, "0"),
       "elements that are in no block: embeddings, head");
  const auto given = examples::read_command_line(argument_count, arguments,
                                                 "Says how many bytes FusedAdamW, FusedLamb or Muon, and "
                                                 "DataParallel or Shards take on each rank, beside "
                                                 "activations.\n\n"
                                                 "  pacer-memory --parameters 7e9 --ranks 8 --dtype bf16\n",
                                                 known);
  if (!given) return 0;
  const Kind kind = examples::choice_of(*given, "dtype", kKinds);
  auto options = pacer::TrainingMemoryOptions(
      static_cast<int64_t>(examples::value_in<double>(*given, "parameters", 1, 1e14)));
  options.ranks(static_cast<int>(examples::value_in<int64_t>(*given, "ranks", 1, 1'000'000)));
  options.dtype(kind.dtype).master_weights(kind.master);
  options.state_bits(examples::value_in<int64_t>(*given, "state-bits", 8, 32));
  options.orthogonalized(static_cast<int64_t>(
      examples::value_in<double>(*given, "orthogonalized", 0, static_cast<double>(options.parameters()))));
  options.unit_bytes(examples::value_in<int64_t>(*given, "unit-mib", 1, 1 << 20) << 20);
  const auto blocks = examples::value_in<int64_t>(*given, "blocks", 1, 1'000'000);
  const auto outside = static_cast<int64_t>(
      examples::value_in<double>(*given, "outside", 0, static_cast<double>(options.parameters())));
  options.outside_blocks(outside).largest_block(
      std::max<int64_t>(1, (options.parameters() - outside + blocks - 1) / blocks));
  const auto released = static_cast<int64_t>(
      examples::value_in<double>(*given, "largest-released", 0, static_cast<double>(options.parameters())));
  const auto with_release = pacer::TrainingMemoryOptions(options).largest_released(released);
  if (released > 0) (void)pacer::training_memory(with_release);  // refused before anything is printed
  std::printf("GB a rank, at the peak of a step:\n%-34s", "");
  for (const char* column : {"weights", "gradients", "moments", "exactness", "units", "all"}) {
    std::printf(" %10s", column);
  }
  std::printf("\n");
  print_row("DataParallel", pacer::training_memory(options));
  if (released > 0) print_row("GradientRelease", pacer::training_memory(with_release));
  print_row("Shards, state", pacer::training_memory(options.sharded(pacer::Sharded::state)));
  print_row("Shards, state and gradients",
            pacer::training_memory(options.sharded(pacer::Sharded::gradients)));
  print_row("Shards of blocks, parameters, too",
            pacer::training_memory(options.sharded(pacer::Sharded::parameters)));
  return 0;
}

}  // namespace

int main(int argument_count, char** arguments) {
  return examples::run_guarded("pacer-memory", [&] { return run(argument_count, arguments); });
}
