// Everything that a training program needs. What lies below it has headers of its own: <pacer/core/core.h>
// (random numbers, tiles, the order of sums), <pacer/files/files.h> (formats and the file system),
// <pacer/kernels/kernels.h> (raw kernels).
#pragma once

#include <pacer/checkpoints/all.h>
#include <pacer/collectives/collectives.h>
#include <pacer/compression/compression.h>
#include <pacer/core/error.h>
#include <pacer/core/version.h>
#include <pacer/hooks/hooks.h>
#include <pacer/metrics/all.h>
#include <pacer/modules/modules.h>
#include <pacer/optimizers/optimizers.h>
#include <pacer/parallel/parallel.h>
#include <pacer/schedulers/schedulers.h>
#include <pacer/session/all.h>
