#!/usr/bin/env bash
# run.sh PYTHON SCRIPT: runs a test of the Python package where torch can be imported; LibTorch for the CPU alone, as
# cmake/bootstrap.sh installs it, lacks what that needs.
set -euo pipefail
if ! reason=$("$1" -c 'import torch' 2>&1); then
  echo "PACER_SKIPPED: $1 cannot import torch: $(tail -n 1 <<<"$reason")"
  exit 0
fi
exec "$1" "$2"
