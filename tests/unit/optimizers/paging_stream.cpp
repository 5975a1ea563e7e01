// The schedule of pages on a simulated device whose queues run in any order that events allow.
#include "support/catch.h"

#include <numeric>

#include <pacer/optimizers/detail/page_stream.h>

#include "support/optimizers/late_page_device.h"

namespace pacer::testing {
namespace {

using detail::PageCopy;
using detail::PageStream;

// Pages of a few numbers each, in two copies, whose update multiplies and adds: applied twice, never or to
// another page's numbers it gives others.
struct Pages {
  static constexpr int64_t kNumbers = 6;
  explicit Pages(size_t count) : numbers(count * kNumbers) { std::iota(numbers.begin(), numbers.end(), 1u); }

  std::vector<std::vector<PageCopy>> copies() {
    std::vector<std::vector<PageCopy>> all;
    for (size_t page = 0; page < numbers.size() / kNumbers; ++page) {
      uint32_t* const begin = numbers.data() + page * kNumbers;
      all.push_back({{begin, 0, 8}, {begin + 2, 8, 16}});
    }
    return all;
  }
  static void update(void* memory, uint32_t step) {
    auto* const values = static_cast<uint32_t*>(memory);
    for (int64_t i = 0; i < kNumbers; ++i) values[i] = values[i] * 3 + step;
  }

  std::vector<uint32_t> numbers;
};

}  // namespace

TEST_CASE("pages are updated once a step, whatever the order in which copies run", "[paging]") {
  for (unsigned seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const size_t count = 1 + seed % 11;
    Pages pages(count), expected(count);
    LatePageDevice device(seed);
    PageStream stream(device, pages.copies());
    for (uint32_t step = 1; step <= 6; ++step) {
      std::vector<char> takes_part(count);
      for (char& part : takes_part) part = random() % 4 != 0;
      if (random() % 2 == 0) stream.prefetch();
      if (random() % 4 == 0) stream.prefetch();
      device.run_some(static_cast<int>(random() % 20));
      stream.run(takes_part, [&stream, step](size_t page) { Pages::update(stream.memory_of(page), step); });
      for (size_t page = 0; page < count; ++page) {
        if (takes_part[page]) Pages::update(expected.numbers.data() + page * Pages::kNumbers, step);
      }
      device.run_some(static_cast<int>(random() % 40));
      if (random() % 3 != 0) continue;
      stream.finish();
      CHECK(pages.numbers == expected.numbers);
      // Host memory may change now, and what was prefetched before must not come back.
      for (uint32_t& number : pages.numbers) number += 5;
      for (uint32_t& number : expected.numbers) number += 5;
    }
    stream.prefetch();  // for a step that is never taken
    stream.finish();
    CHECK(pages.numbers == expected.numbers);
  }
}

TEST_CASE("a step reads and writes every page once, and pages without a part not at all", "[paging]") {
  Pages pages(5);
  LatePageDevice device(1);
  PageStream stream(device, pages.copies());
  stream.prefetch();
  stream.run({1, 1, 1, 1, 1}, [](size_t) {});
  CHECK(device.copied_bytes == 2 * 5 * 24);
  stream.run({0, 1, 0, 0, 1}, [](size_t) {});
  CHECK(device.copied_bytes == 2 * 7 * 24);
  stream.run({0, 0, 0, 0, 0}, [](size_t) {});
  CHECK(device.copied_bytes == 2 * 7 * 24);
  stream.finish();
}

TEST_CASE("a device without room for a page is an error that says so", "[paging]") {
  Pages pages(5);
  LatePageDevice device(1, /*room=*/60);
  CHECK_THROWS_AS(PageStream(device, pages.copies()), DeviceError);
  LatePageDevice enough(1, /*room=*/72);
  PageStream stream(enough, pages.copies());
  CHECK(enough.free_bytes() == 0);
  PageStream none(enough, {});  // all state may stay
  none.prefetch();
  none.run({}, [](size_t) {});
  none.finish();
}

}  // namespace pacer::testing
