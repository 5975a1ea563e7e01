// The pages of a step on their way: from host memory into one of three places on the device, through the
// update, and back. Page k uses place k % 3, so that whatever points into it never changes. The next pages
// come while one is updated and the former ones go; both directions are busy at once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <pacer/optimizers/detail/page_device.h>

namespace pacer::detail {

// Bytes of host memory that are the bytes of a page from `place` on.
struct PageCopy {
  void* host;
  int64_t place;
  int64_t bytes;
};

// Enqueues the copies of a page at `memory`, to the device or back.
void copy_page(PageDevice& device, PageQueue queue, const std::vector<PageCopy>& copies, void* memory);

class PageStream {
 public:
  static constexpr size_t kPlaces = 3;
  static constexpr size_t kEvents = 3 * kPlaces;  // numbers 0 ... kEvents - 1 of the device are its own

  // Takes the memory of the places. Throws DeviceError where the device has none left.
  PageStream(PageDevice& device, std::vector<std::vector<PageCopy>> pages);

  size_t size() const { return pages_.size(); }
  void* memory_of(size_t page) const { return places_[page % kPlaces].memory.get(); }

  // Enqueues the copies of the first pages, if they are not there yet. What host memory holds then is what
  // the next run() updates.
  void prefetch();

  // Enqueues a step of the pages for which takes_part says so: `update` enqueues kernels that change the page
  // at memory_of(page).
  void run(const std::vector<char>& takes_part, const std::function<void(size_t page)>& update);

  // The host waits until all pages are in host memory; what was prefetched is dropped, since host memory may
  // change from now on.
  void finish();

 private:
  struct Place {
    std::shared_ptr<void> memory;
    std::optional<size_t> holds;  // the page that lies there, or will, as host memory has it
    bool is_taken = false;        // by a page of the step that is being enqueued
  };
  static size_t loaded(size_t place) { return 3 * place; }
  static size_t updated(size_t place) { return 3 * place + 1; }
  static size_t stored(size_t place) { return 3 * place + 2; }

  void load(size_t page);

  PageDevice& device_;
  std::vector<std::vector<PageCopy>> pages_;
  std::array<Place, kPlaces> places_;
};

}  // namespace pacer::detail
