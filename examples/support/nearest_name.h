// The known name that a mistyped one most likely meant. Holds no list of names: each caller brings its own.
#pragma once

#include <string>
#include <vector>

namespace examples {

// What a sentence shows of a text that was typed or is in a file: at most 80 bytes of it, and escapes for
// what does not print.
std::string shown(const std::string& text);

// The member of `names` with the smallest edit distance to `typed` (a swap of neighbours counts as one edit;
// the first wins a tie); empty where even that one is too far to be meant.
std::string nearest_name(const std::string& typed, const std::vector<std::string>& names);

// The end of an error sentence: "did you mean 'tiny'?", or, where nothing is near, "known are 'tiny' and
// 'small'".
std::string suggestion(const std::string& typed, const std::vector<std::string>& names);

}  // namespace examples
