# has_gpu.sh: for scripts of bash to source. has_gpu says whether this machine has a GPU of NVIDIA's.
has_gpu() { compgen -G '/dev/nvidia[0-9]*' >/dev/null || [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]]; }
