#include <pacer/optimizers/detail/page_plan.h>

#include <algorithm>

#include <pacer/core/error.h>
#include <pacer/core/tile.h>

namespace pacer::detail {
namespace {

// Neighbours on both sides are one copy; what lies between them is padding.
void add_extent(const PageExtent& next, std::vector<PageExtent>& extents) {
  if (!extents.empty()) {
    PageExtent& last = extents.back();
    if (last.segment == next.segment && next.offset - last.offset == next.place - last.place &&
        next.place - last.place == round_up(last.count, kStateAlignment)) {
      last.count = next.place + next.count - last.place;
      return;
    }
  }
  extents.push_back(next);
}

}  // namespace

std::vector<Page> cut_pages(const std::vector<PagedItem>& items, int64_t bytes_per_element,
                            int64_t page_bytes, bool whole_items) {
  require(bytes_per_element > 0 && page_bytes > 0, "pages of ", page_bytes, " bytes cannot hold elements of ",
          bytes_per_element, " bytes");
  const int64_t capacity = std::max(kPageGrain, page_bytes / bytes_per_element / kPageGrain * kPageGrain);
  std::vector<Page> pages;
  Page page;
  const auto close = [&] {
    if (!page.pieces.empty()) pages.push_back(std::move(page));
    page = {};
  };
  for (const PagedItem& item : items) {
    require(item.count >= 0 && item.offset >= 0 && item.offset % kStateAlignment == 0,
            "an item of a page starts at element ", item.offset, " and has ", item.count, " elements");
    for (int64_t first = 0; first < item.count;) {
      const int64_t left = item.count - first, room = capacity - page.elements;
      int64_t count = left;
      if (left > room) {
        count = whole_items ? 0 : room / kPageGrain * kPageGrain;
        if (count == 0 && !page.pieces.empty()) {
          close();
          continue;
        }
        if (count == 0) count = left;  // whole, and larger than a page
      }
      page.pieces.push_back({item.item, first, count, page.elements});
      add_extent({item.segment, item.offset + first, page.elements, count}, page.extents);
      page.elements += round_up(count, kStateAlignment);
      first += count;
    }
  }
  close();
  return pages;
}

int64_t paged_bytes(int64_t count, int64_t bytes_per_element) {
  return round_up(count, kStateAlignment) * bytes_per_element;
}

std::vector<char> choose_resident(const std::vector<int64_t>& bytes, int64_t budget) {
  std::vector<char> is_resident;
  for (const int64_t size : bytes) {
    is_resident.push_back(size <= budget);
    if (size <= budget) budget -= size;
  }
  return is_resident;
}

}  // namespace pacer::detail
