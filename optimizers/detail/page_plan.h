// How the state of many tensors is cut into pages: pure arithmetic on element counts. No memory is touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pacer::detail {

// Elements. Tensors start at multiples of the alignment, in host memory and in pages, so that every field of
// every piece is aligned for the widest accesses; pages cut a tensor at multiples of the grain.
constexpr int64_t kStateAlignment = 128;
constexpr int64_t kPageGrain = 1024;

// A tensor whose state has elements offset ... offset + count - 1 of a segment of host memory.
struct PagedItem {
  size_t item;  // the caller's number of it
  size_t segment;
  int64_t offset;
  int64_t count;
};

// Elements first ... first + count - 1 of an item, which are the page's elements from `place` on.
struct PagePiece {
  size_t item;
  int64_t first;
  int64_t count;
  int64_t place;
};

// What one copy of each field moves: a segment's elements from `offset` on, the page's from `place` on.
struct PageExtent {
  size_t segment;
  int64_t offset;
  int64_t place;
  int64_t count;
};

// Fields lie in a page one after the other, `elements` of each.
struct Page {
  std::vector<PagePiece> pieces;
  std::vector<PageExtent> extents;
  int64_t elements = 0;
};

// Cuts the items into pages of at most page_bytes, in their order, each element in exactly one. Where
// `whole_items`, no item is cut, and one that is larger than that has a page for itself. Items without
// elements are in no page. A page has at least kPageGrain elements, however small page_bytes is.
std::vector<Page> cut_pages(const std::vector<PagedItem>& items, int64_t bytes_per_element,
                            int64_t page_bytes, bool whole_items);

// Bytes that an item of so many elements takes in a page.
int64_t paged_bytes(int64_t count, int64_t bytes_per_element);

// Which items of these sizes stay on the device: in their order, each that still fits into `budget`.
std::vector<char> choose_resident(const std::vector<int64_t>& bytes, int64_t budget);

}  // namespace pacer::detail
