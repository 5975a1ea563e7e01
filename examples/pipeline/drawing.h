// A simulated pipeline as text and as an SVG file that stands alone. Times are in slots, whole numbers.
#pragma once

#include <string>
#include <vector>

#include <pacer/parallel/pipeline_simulation.h>

namespace pipeline {

// One line a rank and one column a slot: F, B, I and W for forward, backward and its input and weight halves,
// with the number of the micro-batch and, among several chunks, a letter for the chunk; a point where the
// rank stands idle.
std::string text_drawing(const std::vector<pacer::PipelinePlan>& plans, int64_t chunks,
                         const pacer::PipelineSimulation& simulated);

// One row a rank and one box a pass, as wide as the pass is long.
std::string svg_drawing(const std::string& title, const std::vector<pacer::PipelinePlan>& plans,
                        int64_t chunks, const pacer::PipelineSimulation& simulated);

}  // namespace pipeline
