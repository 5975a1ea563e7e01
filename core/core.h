// Everything of core: the floor under pacer. No LibTorch, no CUDA.
#pragma once

#include <pacer/core/error.h>
#include <pacer/core/host_device.h>
#include <pacer/core/option.h>
#include <pacer/core/philox.h>
#include <pacer/core/reduction_order.h>
#include <pacer/core/tile.h>
#include <pacer/core/version.h>
