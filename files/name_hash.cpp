#include <pacer/files/name_hash.h>

#include <array>
#include <cstddef>
#include <cstring>

namespace pacer {

uint32_t name_hash(std::string_view name) {
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio
  uint64_t hash = name.size();
  for (; name.size() > sizeof hash; name.remove_prefix(sizeof hash)) {
    uint64_t word;
    std::memcpy(&word, name.data(), sizeof word);
    hash = (hash ^ word) * kFactor;
    hash ^= hash >> 32;
  }
  uint64_t rest = 0;
  if (!name.empty()) std::memcpy(&rest, name.data(), name.size());
  hash = (hash ^ rest) * kFactor;
  return static_cast<uint32_t>(hash >> 32);
}

// Radix sort, from the lowest bits up.
void sort_by_hash(std::vector<HashedName>& names) {
  constexpr size_t kBits = 11, kBuckets = size_t{1} << kBits;
  std::vector<HashedName> sorted(names.size());
  for (size_t shift = 0; shift < 32; shift += kBits) {
    const auto bucket_of = [&](const HashedName& each) { return (each.hash >> shift) & (kBuckets - 1); };
    std::array<size_t, kBuckets + 1> begin{};  // of each bucket
    for (const HashedName& each : names) ++begin[bucket_of(each) + 1];
    for (size_t bucket = 0; bucket < kBuckets; ++bucket) begin[bucket + 1] += begin[bucket];
    for (const HashedName& each : names) sorted[begin[bucket_of(each)]++] = each;
    names.swap(sorted);
  }
}

}  // namespace pacer
