// What the library warns of, kept for a test to read.
#pragma once

#include <string>

#include <c10/util/Exception.h>

namespace pacer::testing {

// Takes the warnings of the thread that installs it by c10::WarningUtils::WarningHandlerGuard.
class HeardWarnings : public c10::WarningHandler {
 public:
  explicit HeardWarnings(std::string& said) : said_(&said) {}
  void process(const c10::Warning& warning) override { *said_ += warning.msg() + "\n"; }

 private:
  std::string* said_;
};

}  // namespace pacer::testing
