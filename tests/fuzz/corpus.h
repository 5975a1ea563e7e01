// A corpus is one text file, so that a change of it can be read: an input a line, with \xNN for bytes that do
// not print, and comments behind '#'.
#pragma once

#include <string>
#include <vector>

namespace pacer::fuzz {

// The inputs of the file; throws where a line is none.
std::vector<std::string> read_corpus(const std::string& path);

// The words of a dictionary as libFuzzer has it, a quoted one a line.
std::vector<std::string> read_dictionary(const std::string& path);

// What programs of both kinds offer; true where it was asked for and done:
//   --unpack CORPUS FOLDER   writes the seeds and the corpus as files, as libFuzzer wants them
//   --pack FOLDER            prints a folder of files as the lines of a corpus
bool serve_corpus(const std::vector<std::string>& arguments);

}  // namespace pacer::fuzz
