// Everything of core: the floor under pacer. No LibTorch, no CUDA.
#pragma once

#include <pacer/core/checkpoint_folder.h>
#include <pacer/core/checkpoint_manifest.h>
#include <pacer/core/checkpoint_names.h>
#include <pacer/core/checkpoint_parts.h>
#include <pacer/core/checksum.h>
#include <pacer/core/crc32c.h>
#include <pacer/core/error.h>
#include <pacer/core/file_descriptor.h>
#include <pacer/core/file_system.h>
#include <pacer/core/folder_lock.h>
#include <pacer/core/host_device.h>
#include <pacer/core/json_lines.h>
#include <pacer/core/json_scanner.h>
#include <pacer/core/name_hash.h>
#include <pacer/core/philox.h>
#include <pacer/core/reduction_order.h>
#include <pacer/core/safetensors.h>
#include <pacer/core/signals_blocked.h>
#include <pacer/core/tensorboard_events.h>
#include <pacer/core/tile.h>
#include <pacer/core/utf8.h>
#include <pacer/core/version.h>
