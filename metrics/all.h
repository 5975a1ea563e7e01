// Everything of metrics: what a training shows and writes down of itself.
#pragma once

#include <pacer/metrics/metrics.h>
#include <pacer/metrics/progress_bar.h>
