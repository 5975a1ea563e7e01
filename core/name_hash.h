// Names by their hashes, to find a name among millions and two that are equal: comparing hashes is much
// faster than comparing names, each of which waits for its place in memory.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace pacer {

struct HashedName {
  uint32_t hash = 0;
  uint32_t number = 0;  // of the name, wherever the names are
};

// The same on every machine of this byte order. No secret: who may choose names can make many of one hash,
// so those of one hash need another order as well.
uint32_t name_hash(std::string_view name);

// By hash; those of one hash keep their order. Time is linear, and memory twice that of the list.
void sort_by_hash(std::vector<HashedName>& names);

}  // namespace pacer
