// Where a model is cut into the stages of a pipeline, as a pure function of what its blocks cost. It knows no
// blocks: costs are seconds, bytes or counts, as the caller measured or estimated them.
//
//   auto bounds = pacer::balanced_cut({3, 1, 1, 1, 2}, 2);    // {0, 2, 5}: blocks 0 and 1, then 2, 3 and 4
#pragma once

#include <cstdint>
#include <vector>

namespace pacer {

// Returns parts + 1 bounds, from 0 to the number of blocks: part i has the blocks from bounds[i] to
// bounds[i + 1] - 1, at least one, and the largest sum of a part's costs is the smallest that there is. Of
// several such cuts it is the one whose first part has the most blocks, then its second, and so on. Takes
// time in O(blocks^2 * parts). Throws InvalidArgument unless 1 <= parts <= blocks, and for a cost that is
// negative or not finite.
std::vector<int64_t> balanced_cut(const std::vector<double>& costs, int64_t parts);

}  // namespace pacer
