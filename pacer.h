// Everything of pacer.
#pragma once

#include <pacer/collectives/collectives.h>
#include <pacer/compression/compression.h>
#include <pacer/core/core.h>
#include <pacer/kernels/kernels.h>
#include <pacer/modules/modules.h>
#include <pacer/optimizers/optimizers.h>
#include <pacer/schedulers/schedulers.h>
#include <pacer/sharding/sharding.h>
