// Names by their hashes, to find a name among millions and two that are equal: comparing hashes is much
// faster than comparing names, each of which waits for its place in memory.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace pacer {

// A name in a list that is kept elsewhere.
struct HashedName {
  uint32_t hash = 0;
  uint32_t number = 0;  // of the name in the list
};

// Returns the hash of a name, the same in every run. It is no secret: who may choose the names can make many
// of one hash, so that a list of these needs an order besides.
uint32_t name_hash(std::string_view name);

// Sorts by hash; names of one hash keep their order. Time is linear, and needs the memory of the list again.
void sort_by_hash(std::vector<HashedName>& names);

}  // namespace pacer
