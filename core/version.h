// Which pacer this is.
#pragma once

namespace pacer {

// "0.1.0": major, minor and patch number, as CMakeLists.txt has them.
const char* version();

}  // namespace pacer
