// Everything of files: the file system, checkpoint folders, safetensors, JSON and TensorBoard's events.
// No LibTorch, no CUDA.
#pragma once

#include <pacer/files/checkpoint_folder.h>
#include <pacer/files/checkpoint_manifest.h>
#include <pacer/files/checkpoint_names.h>
#include <pacer/files/checksum.h>
#include <pacer/files/crc32c.h>
#include <pacer/files/file_descriptor.h>
#include <pacer/files/file_system.h>
#include <pacer/files/folder_lock.h>
#include <pacer/files/json_lines.h>
#include <pacer/files/json_scanner.h>
#include <pacer/files/json_writer.h>
#include <pacer/files/name_hash.h>
#include <pacer/files/number_text.h>
#include <pacer/files/safetensors.h>
#include <pacer/files/save_records.h>
#include <pacer/files/signals_blocked.h>
#include <pacer/files/tensorboard_events.h>
#include <pacer/files/utf8.h>
