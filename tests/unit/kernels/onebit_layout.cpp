// How the tensors of a 1-bit exchange are laid out and cut: the formulas, and that rows hold each real
// element once, in order, for lists of any shape.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <pacer/core/error.h>
#include <pacer/kernels/onebit_layout.h>

#include "support/catch.h"
#include "support/samples.h"

namespace pacer::kernels::testing::onebit_layout {
namespace {

using pacer::testing::Samples;

constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();

// {tensor, element in it} for each position of a range of the buffer; {-1, 0} is padding.
using Owners = std::vector<std::pair<int64_t, int64_t>>;

Owners owners_of_buffer(const std::vector<int64_t>& counts) {
  Owners owners;
  for (size_t t = 0; t < counts.size(); ++t) {
    for (int64_t i = 0; i < counts[t]; ++i) owners.emplace_back(static_cast<int64_t>(t), i);
    while (owners.size() % 128 != 0) owners.emplace_back(-1, 0);
  }
  return owners;
}

// "" or what is wrong with rows that should hold what the owners say.
std::string problem_of(const OneBitRows& rows, const Owners& expected) {
  if (rows.extent != static_cast<int64_t>(expected.size())) return "extent";
  if (rows.count() != (rows.extent + 2047) / 2048) return "number of rows";
  if (rows.units() != (rows.extent + 32767) / 32768) return "number of units";
  if (rows.first.front() != 0 || rows.first.back() != static_cast<int64_t>(rows.pieces.size())) return "ends";
  Owners owners(expected.size(), {-1, 0});
  int64_t all_real = 0, reached = 0;
  for (int64_t row = 0; row < rows.count(); ++row) {
    int64_t real = 0;
    for (int64_t p = rows.first[static_cast<size_t>(row)]; p < rows.first[static_cast<size_t>(row) + 1];
         ++p) {
      const OneBitPiece& piece = rows.pieces[static_cast<size_t>(p)];
      if (piece.count == 0) return "empty piece";
      if (piece.position < std::max(reached, 2048 * row)) return "order of pieces";
      reached = piece.position + piece.count;
      if (reached > std::min(rows.extent, 2048 * (row + 1))) return "piece beyond its row";
      real += piece.count;
      for (int64_t i = 0; i < piece.count; ++i) {
        owners[static_cast<size_t>(piece.position + i)] = {piece.tensor, piece.offset + i};
      }
    }
    if (rows.real_elements(row) != real) return "real elements of a row";
    all_real += real;
  }
  if (rows.real_elements() != all_real) return "real elements";
  return owners == expected ? "" : "elements";
}

std::vector<int64_t> random_counts(Samples& samples) {
  std::vector<int64_t> counts(static_cast<size_t>(samples.below(12)));
  for (int64_t& count : counts) {
    const int64_t around[] = {0, 0, 1, 127, 128, 129, 2047, 2048, 2049, 4096, 33000};
    count = samples.chance(0.5) ? samples.one_of(around) : samples.below(3000);
  }
  return counts;
}

bool is_refused(const std::vector<int64_t>& counts, int64_t world_size, int64_t alignment = 128) {
  try {
    OneBitLayout(counts, world_size, alignment);
  } catch (const InvalidArgument&) {
    return true;
  }
  return false;
}

}  // namespace

TEST_CASE("rows hold each real element once, over the buffer and over what each rank serves",
          "[kernels][onebit]") {
  Samples samples(5);
  for (int run = 0; run < 400; ++run) {
    const std::vector<int64_t> counts = random_counts(samples);
    const int64_t world_size = 1 + samples.below(9);
    const int64_t alignments[] = {128, 128, 256, 640, 2048, 4096};
    const int64_t alignment = samples.one_of(alignments);
    const OneBitLayout layout(counts, world_size, alignment);
    const Owners owners = owners_of_buffer(counts);
    const auto length = static_cast<int64_t>(owners.size());
    INFO("run " << run << ", " << world_size << " ranks, alignment " << alignment);

    REQUIRE(layout.counts() == counts);
    REQUIRE(layout.world_size() == world_size);
    REQUIRE(layout.length() == length);
    int64_t offset = 0;
    for (size_t t = 0; t < counts.size(); ++t) {
      REQUIRE(layout.offset(t) == offset);
      offset += (counts[t] + 127) / 128 * 128;
    }
    // A ceil(length / (A W)), the least multiple of which W are enough.
    const int64_t chunk = layout.chunk();
    REQUIRE(chunk == alignment * ((length + alignment * world_size - 1) / (alignment * world_size)));
    REQUIRE((chunk * world_size >= length && (chunk == 0 || (chunk - alignment) * world_size < length)));

    REQUIRE(problem_of(layout.rows(), owners) == "");
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const Owners served(owners.begin() + std::min(length, rank * chunk),
                          owners.begin() + std::min(length, (rank + 1) * chunk));
      INFO("rank " << rank);
      REQUIRE(problem_of(layout.served_rows(rank), served) == "");
    }
  }
}

TEST_CASE("an exchange of nothing has no rows", "[kernels][onebit]") {
  for (const std::vector<int64_t>& counts : {std::vector<int64_t>{}, {0}, {0, 0, 0}}) {
    const OneBitLayout layout(counts, 3);
    CHECK(layout.length() == 0);
    CHECK(layout.chunk() == 0);
    CHECK(layout.rows().count() == 0);
    CHECK(layout.rows().units() == 0);
    CHECK(layout.rows().real_elements() == 0);
    CHECK(layout.served_rows(2).extent == 0);
  }
}

TEST_CASE("each 128 positions of the buffer have the tensor that they belong to", "[kernels][onebit]") {
  CHECK(OneBitLayout({300, 0, 128, 1}, 2).tensors() == std::vector<uint32_t>{0, 0, 0, 2, 3});
}

TEST_CASE("layouts that cannot be are refused", "[kernels][onebit]") {
  CHECK(is_refused({5}, 0));
  CHECK(is_refused({5}, -1));
  CHECK(is_refused({5, -1}, 1));
  for (const int64_t alignment : {0, -128, 1, 64, 127, 129, 200}) CHECK(is_refused({5}, 2, alignment));
  CHECK(is_refused({kLargest, 1}, 1));
  CHECK(!is_refused({5}, 1));
}

TEST_CASE("layouts whose padded size no 64-bit number holds are refused", "[kernels][onebit]") {
  CHECK(is_refused({kLargest}, 1));
  CHECK(is_refused({kLargest / 2, kLargest / 2, 1}, 4));
  CHECK(is_refused({5}, 3, int64_t{1} << 62));
}

}  // namespace pacer::kernels::testing::onebit_layout
