// How state is cut into pages, and which of it stays: pure arithmetic.
#include "support/catch.h"

#include <map>
#include <random>

#include <pacer/core/error.h>
#include <pacer/core/tile.h>
#include <pacer/optimizers/detail/page_plan.h>

namespace pacer::testing {
namespace {

using detail::cut_pages;
using detail::kPageGrain;
using detail::kStateAlignment;
using detail::Page;
using detail::PagedItem;

// Items of these sizes side by side in segment 0.
std::vector<PagedItem> side_by_side(const std::vector<int64_t>& counts) {
  std::vector<PagedItem> items;
  int64_t offset = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    items.push_back({i, 0, offset, counts[i]});
    offset += round_up(counts[i], kStateAlignment);
  }
  return items;
}

// Every element of every item once, in order, at a place inside the page that no other has, and moved by
// exactly one extent.
void check_pages(const std::vector<Page>& pages, const std::vector<PagedItem>& items) {
  std::map<size_t, int64_t> reached;
  for (const Page& page : pages) {
    REQUIRE_FALSE(page.pieces.empty());
    int64_t end = 0;
    for (const auto& piece : page.pieces) {
      CHECK(piece.first == reached[piece.item]);
      CHECK(piece.count > 0);
      CHECK(piece.place % kStateAlignment == 0);
      CHECK(piece.first % kPageGrain == 0);
      CHECK(piece.place >= end);
      end = piece.place + piece.count;
      reached[piece.item] += piece.count;
      int covering = 0;
      for (const auto& extent : page.extents) {
        const bool holds = extent.place <= piece.place && end <= extent.place + extent.count;
        const PagedItem& item = items[piece.item];
        covering += holds && extent.segment == item.segment &&
                    extent.offset + (piece.place - extent.place) == item.offset + piece.first;
      }
      CHECK(covering == 1);
    }
    CHECK(end <= page.elements);
    int64_t copied = 0;
    for (const auto& extent : page.extents) {
      CHECK(extent.place >= copied);
      copied = extent.place + extent.count;
    }
    CHECK(copied == end);  // no copy goes past the last element
  }
  for (const PagedItem& item : items) CHECK(reached[item.item] == item.count);
}

}  // namespace

TEST_CASE("every element of paged state is in exactly one page", "[paging]") {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> counts(1 + random() % 12);
    for (int64_t& count : counts) count = random() % 3 == 0 ? random() % 3 : random() % 20000;
    std::vector<PagedItem> items = side_by_side(counts);
    // Some in another segment, as after the list of parameters was changed.
    for (PagedItem& item : items) item.segment = random() % 4 == 0;
    const int64_t bytes = 2 * (1 + random() % 8), page = 4096 << random() % 6;
    CAPTURE(round, bytes, page);
    for (const bool whole : {false, true}) {
      const auto pages = cut_pages(items, bytes, page, whole);
      check_pages(pages, items);
      for (const Page& made : pages) {
        if (whole) {
          for (const auto& piece : made.pieces) CHECK(piece.count == items[piece.item].count);
        }
        const bool fits = made.elements * bytes <= page || made.elements <= kPageGrain;
        CHECK((fits || (whole && made.pieces.size() == 1)));
      }
    }
  }
}

TEST_CASE("pages are full, and neighbours travel in one copy", "[paging]") {
  // 8 bytes an element, 8,192 elements a page.
  const auto items = side_by_side({5000, 3000, 0, 20000, 1});
  const auto pages = cut_pages(items, 8, 65536, /*whole_items=*/false);
  REQUIRE(pages.size() == 4);
  CHECK(pages[0].pieces.size() == 2);  // what is left of the page is less than a grain
  CHECK(pages[1].elements == 8192);
  CHECK(pages[2].elements == 8192);
  for (const Page& page : pages) CHECK(page.extents.size() == 1);
  auto in_two_segments = side_by_side({100, 200, 300});
  in_two_segments.front().segment = 1;
  CHECK(cut_pages(in_two_segments, 8, 65536, false).front().extents.size() == 2);
  CHECK(cut_pages(side_by_side({0, 0}), 8, 65536, false).empty());
  CHECK(cut_pages({}, 8, 65536, true).empty());
}

TEST_CASE("a page of LAMB has whole tensors, and as much room as the largest needs", "[paging]") {
  const auto pages = cut_pages(side_by_side({100, 50000, 100, 200}), 8, 65536, /*whole_items=*/true);
  REQUIRE(pages.size() == 3);
  CHECK(pages[1].pieces.front().count == 50000);
  CHECK(pages[2].pieces.size() == 2);
}

TEST_CASE("state stays on the device as long as it fits, tensor by tensor", "[paging]") {
  using detail::choose_resident;
  CHECK(choose_resident({10, 20, 30}, 0) == std::vector<char>{0, 0, 0});
  CHECK(choose_resident({10, 20, 30}, 60) == std::vector<char>{1, 1, 1});
  CHECK(choose_resident({10, 50, 30, 5}, 45) == std::vector<char>{1, 0, 1, 1});
  CHECK(choose_resident({0, 1}, 0) == std::vector<char>{1, 0});
}

TEST_CASE("pages that cannot be are refused", "[paging]") {
  CHECK_THROWS_AS(cut_pages({{0, 0, 5, 10}}, 8, 4096, false), InvalidArgument);
  CHECK_THROWS_AS(cut_pages({{0, 0, 0, -1}}, 8, 4096, false), InvalidArgument);
  CHECK_THROWS_AS(cut_pages({}, 0, 4096, false), InvalidArgument);
}

}  // namespace pacer::testing
