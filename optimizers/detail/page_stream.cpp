#include <pacer/optimizers/detail/page_stream.h>

#include <algorithm>

#include <pacer/core/error.h>

namespace pacer::detail {

void copy_page(PageDevice& device, PageQueue queue, const std::vector<PageCopy>& copies, void* memory) {
  for (const PageCopy& copy : copies) {
    void* const on_device = static_cast<char*>(memory) + copy.place;
    const bool is_load = queue == PageQueue::load;
    device.copy(queue, is_load ? on_device : copy.host, is_load ? copy.host : on_device, copy.bytes);
  }
}

PageStream::PageStream(PageDevice& device, std::vector<std::vector<PageCopy>> pages)
    : device_(device), pages_(std::move(pages)) {
  int64_t largest = 0;
  for (const auto& page : pages_) {
    for (const PageCopy& copy : page) largest = std::max(largest, copy.place + copy.bytes);
  }
  for (size_t i = 0; i < std::min(kPlaces, pages_.size()); ++i) {
    places_[i].memory = device_.device_memory(largest);
    require<DeviceError>(
        places_[i].memory != nullptr, "the GPU has no ", largest,
        " bytes left for a page of optimizer state; set a smaller page_bytes() or make room");
  }
}

void PageStream::load(size_t page) {
  const size_t i = page % kPlaces;
  Place& place = places_[i];
  if (place.holds == page) return;
  // Of the page that was here, and of this one's former step: both were stored from this place.
  device_.wait(PageQueue::load, stored(i));
  place.holds.reset();  // until all copies are enqueued
  copy_page(device_, PageQueue::load, pages_[page], place.memory.get());
  device_.record(PageQueue::load, loaded(i));
  place.holds = page;
}

void PageStream::prefetch() {
  for (size_t page = 0; page < std::min(kPlaces, pages_.size()); ++page) load(page);
}

void PageStream::run(const std::vector<char>& takes_part, const std::function<void(size_t page)>& update) {
  std::vector<size_t> order;
  for (size_t page = 0; page < pages_.size(); ++page) {
    if (takes_part[page]) order.push_back(page);
  }
  for (Place& place : places_) place.is_taken = false;
  size_t next = 0;  // to be loaded
  for (const size_t page : order) {
    for (; next < order.size() && !places_[order[next] % kPlaces].is_taken; ++next) {
      load(order[next]);
      places_[order[next] % kPlaces].is_taken = true;
    }
    const size_t i = page % kPlaces;
    Place& place = places_[i];
    device_.wait(PageQueue::update, loaded(i));
    place.holds.reset();  // from here on the device's is the newer one
    device_.update([update, page] { update(page); });
    device_.record(PageQueue::update, updated(i));
    device_.wait(PageQueue::store, updated(i));
    copy_page(device_, PageQueue::store, pages_[page], place.memory.get());
    device_.record(PageQueue::store, stored(i));
    place.is_taken = false;
  }
}

void PageStream::finish() {
  device_.synchronize(PageQueue::load);  // it reads host memory
  device_.synchronize(PageQueue::store);
  for (Place& place : places_) place.holds.reset();
}

}  // namespace pacer::detail
