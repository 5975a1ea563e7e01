// Everything of pacer.
#pragma once

#include <pacer/checkpoints/all.h>
#include <pacer/collectives/collectives.h>
#include <pacer/compression/compression.h>
#include <pacer/core/core.h>
#include <pacer/files/files.h>
#include <pacer/hooks/hooks.h>
#include <pacer/kernels/kernels.h>
#include <pacer/metrics/all.h>
#include <pacer/modules/modules.h>
#include <pacer/optimizers/optimizers.h>
#include <pacer/parallel/parallel.h>
#include <pacer/schedulers/schedulers.h>
#include <pacer/session/all.h>
