#include <pacer/core/version.h>

namespace pacer {

const char* version() { return PACER_VERSION; }

}  // namespace pacer
