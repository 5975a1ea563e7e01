#!/usr/bin/env bash
# Sets up what pacer needs to be built: tools and headers of the system, and LibTorch. Says what it will install, and how
# much, before it does; where everything is present it installs and downloads nothing. Safe to run again at any time,
# also after an interruption.
#
#   Torch_DIR, TORCH_ROOT  use this LibTorch
#   PACER_LIBTORCH=VERSION that version instead of the newest that pacer is tested with, for example 2.11.0
#   PACER_CUDA=OFF         the small LibTorch, even with a GPU or nvcc
#   PACER_VENV=FOLDER      install LibTorch there, whatever there is elsewhere; default: .venv, where none is found
#
# The folder of the LibTorch that was found or installed is written to build/libtorch, where CMake looks for it; that of a
# PACER_VENV is for its caller to name.
#   PACER_DEPS=FOLDER      unpacked Debian packages (FOLDER/usr/include ...) with headers that the system lacks
#
#   --with-readers         also what tests read checkpoints and event files with, mypy and transformers, into the
#                          project's .venv, and Doxygen, which makes the reference
#
# Exit code 2: something is missing that this script cannot install; it says what.
set -euo pipefail
[[ $# == 0 || "$*" == --with-readers ]] || { echo "set-up: unknown arguments: $*" >&2; exit 2; }
with_readers=$#
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The range of versions, from the one place that states it.
libtorch_of() { sed -n "s/^set(PACER_LIBTORCH_$1 \([0-9.]*\))$/\1/p" cmake/LibTorch.cmake; }
oldest=$(libtorch_of OLDEST) newest=$(libtorch_of NEWEST)
chosen=${PACER_LIBTORCH:-}
torch_version=${chosen:-$newest}  # what is installed, where something has to be
venv=${PACER_VENV:-.venv}
unfinished=$venv/pacer-unfinished  # exists while something is being installed
recipe_file=$venv/pacer-recipe     # what was installed, once it is complete

say() { printf 'set-up: %s\n' "$*"; }
stop() {
  printf 'set-up: %s\n' "$@" >&2
  exit 2
}
have() { command -v "$1" >/dev/null; }
# at_least WANTED VERSION
at_least() { [[ $(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]; }

# --- the system ------------------------------------------------------------------------------------------------------

have_header() {
  local root
  for root in ${PACER_DEPS:+"$PACER_DEPS/usr/include"} /usr/include /usr/local/include ${CONDA_PREFIX:+"$CONDA_PREFIX/include"}; do
    [[ -e $root/$1 ]] && return
  done
  return 1
}

have_cmake() {
  local version
  have cmake && version=$(cmake --version) && version=${version#cmake version } && at_least 3.24 "${version%%[^0-9.]*}"
}

have_compiler() {
  local version
  have "${CXX:-c++}" && version=$("${CXX:-c++}" -dumpversion) && at_least 11 "$version"
}

missing_packages() {
  have_cmake || echo cmake
  have ninja || echo ninja-build
  have_compiler || echo g++
  have_header catch2/catch_test_macros.hpp || have_header catch2/catch.hpp || echo catch2
  have_header nlohmann/json.hpp || echo nlohmann-json3-dev
  have_header xxhash.h || echo libxxhash-dev
  have_header boost/program_options.hpp || echo libboost-program-options-dev
  if ((need_torch)); then
    # Debian's python3 comes without what it takes to create a .venv.
    python3 -c 'import ensurepip, venv' 2>/dev/null || printf '%s\n' python3 python3-venv ca-certificates
  fi
}

# Only worth having when something is being installed anyway.
missing_comforts() {
  have ccache || echo ccache
  have git || echo git
  [[ ${CI:-} != true ]] || have clang-format-14 || echo clang-format-14
  [[ ${CI:-} != true ]] || have clang-tidy-14 || echo clang-tidy-14
  [[ ${CI:-} != true ]] || have pkg-config || echo pkg-config
}

install_packages() {
  local command=(apt-get install --yes --no-install-recommends "$@")
  if ! have apt-get; then
    stop "please install these, by the names they have on Debian: $*"
  elif [[ $EUID != 0 ]]; then
    stop "these packages are missing, and only root can install them; please run, or ask for:" "  sudo ${command[*]}"
  fi
  say "packages to install: $*"
  export DEBIAN_FRONTEND=noninteractive LC_ALL=C
  say "reading the package lists"
  apt-get update -qq || stop "the package lists could not be read; without network, install these by hand: $*"
  "${command[@]}" --assume-no 2>/dev/null | sed -n 's/^\(Need to get\|After this operation\)/set-up:   \1/p' || true
  say "installing them"
  "${command[@]}" -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 >/dev/null ||
    stop "the packages could not be installed; without network, install these by hand: $*"
}

# --- LibTorch --------------------------------------------------------------------------------------------------------

# The version of the LibTorch whose prefix is $1, or nothing.
torch_version_of() {
  local header=$1/include/torch/headeronly/version.h
  [[ -e $header ]] || header=$1/include/torch/csrc/api/include/torch/version.h
  [[ -e $header && -e $1/share/cmake/Caffe2/Caffe2Targets.cmake && -e $1/lib/libtorch_cpu.so ]] || return 0
  sed -n 's/^#define TORCH_VERSION_\(MAJOR\|MINOR\|PATCH\) *//p' "$header" | paste -sd.
}

minor_of() { cut -d. -f1,2 <<<"$1"; }

# Whether pacer can use that version: the chosen one, or any that is not too old. What is newer than all that pacer is
# tested with is used with a warning, by CMake.
fits() {
  [[ -n $1 ]] || return 1
  if [[ -n $chosen ]]; then [[ $1 == "$chosen" ]]; else at_least "$oldest" "$1"; fi
}

wanted() { if [[ -n $chosen ]]; then echo "$chosen, which PACER_LIBTORCH names"; else echo "$oldest to $newest"; fi; }

if [[ -n $chosen ]]; then
  [[ $chosen =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] && at_least "$oldest" "$chosen" && at_least "$(minor_of "$chosen")" "$(minor_of "$newest")" ||
    stop "PACER_LIBTORCH is $chosen, but pacer is made for LibTorch $oldest to $newest; name one of these, with three numbers."
fi

# The LibTorch that the user named. A wrong one is an error.
use_named_torch() {
  local named=${Torch_DIR:-${TORCH_ROOT:-}} prefix version
  [[ -n $named ]] || return 1
  for prefix in "$named" "$named/torch" "$named/../../.." "$named/../.."; do
    version=$(torch_version_of "$prefix")
    [[ -n $version ]] && break
  done
  [[ -n $version ]] || stop "there is no LibTorch in $named, which Torch_DIR or TORCH_ROOT names."
  fits "$version" || stop "$named holds LibTorch $version, but pacer needs $(wanted)."
  say "LibTorch $version in $named, as named by Torch_DIR or TORCH_ROOT"
  torch_prefix=$prefix
}

# The torch that python3 finds, located without importing it. One of another version is passed by.
use_torch_of_python() {
  local prefix version
  prefix=$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])' 2>/dev/null) ||
    return 1
  [[ $prefix -ef $(venv_torch) ]] && return 1  # may be unfinished
  version=$(torch_version_of "$prefix")
  fits "$version" || return 1
  say "LibTorch $version in $prefix, the torch of python3"
  torch_prefix=$prefix
}

place_of_venv() { realpath --no-symlinks "$venv"; }

venv_torch() {
  local prefix
  for prefix in "$venv"/lib/python3*/site-packages/torch; do
    printf '%s' "$prefix"
    return
  done
}

# An nvcc of the CUDA version that LibTorch is built with.
have_nvcc() {
  local nvcc
  for nvcc in nvcc "${CUDA_HOME:-}/bin/nvcc" "${CUDA_PATH:-}/bin/nvcc" /usr/local/cuda/bin/nvcc; do
    if have "$nvcc"; then
      [[ $("$nvcc" --version) == *"release 13."* ]]
      return
    fi
  done
  return 1
}

source cmake/has_gpu.sh

choose_recipe() {
  if [[ ${PACER_CUDA:-AUTO} == OFF ]]; then
    echo cpu
  elif have_nvcc; then
    echo cuda
  elif [[ ${PACER_CUDA:-AUTO} == ON ]] || has_gpu; then
    echo cuda+nvcc
  else
    echo cpu
  fi
}

# Of each recipe: what it is, megabytes to download, megabytes on disk, and pip's arguments. nvcc, its parts and the
# libraries that LibTorch for the CPU loads are those of the CUDA that this LibTorch is built with.
describe_recipe() {
  local runtime=13.2.86 cupti=13.2.86 toolkit=13.2.2 nvcc=13.2.86
  at_least 2.15 "$torch_version" || { runtime=13.0.96 cupti=13.0.85 toolkit=13.0.3 nvcc=13.0.88; }
  at_least 2.13 "$torch_version" || toolkit=13.0.2
  case $1 in
    cpu)
      what="LibTorch $torch_version for the CPU" download=544 disk=1250
      packages=(--no-deps "torch==$torch_version" "nvidia-cuda-runtime==$runtime" "nvidia-cuda-cupti==$cupti")
      ;;
    cuda)
      what="LibTorch $torch_version with CUDA 13" download=2910 disk=5300
      packages=("torch==$torch_version")
      ;;
    cuda+nvcc)
      what="LibTorch $torch_version with CUDA 13, and nvcc, as no CUDA toolkit was found"
      download=3010 disk=5600
      packages=("torch==$torch_version" "cuda-toolkit[nvcc,cccl,cudart]==$toolkit" "nvidia-cuda-crt==$nvcc"
        "nvidia-nvvm==$nvcc")
      ;;
  esac
}

# What is installed suffices when it is the wanted recipe or more.
recipe_suffices() {
  case $1:$2 in
    "$2:$2" | *:cpu | cuda+nvcc:cuda) return 0 ;;
    *) return 1 ;;
  esac
}

# The .venv of this project, when it is whole and holds enough. One that is damaged, or that holds another LibTorch than
# the one to install, is removed: two versions in one folder would be neither.
use_torch_of_venv() {
  local installed version damage=
  [[ -e $venv ]] || return 1
  installed=$(cat "$recipe_file" 2>/dev/null || true)
  version=$(torch_version_of "$(venv_torch)")
  if [[ -e $unfinished ]]; then
    damage="whose installation was interrupted"
  elif ! "$venv/bin/python3" -c '' 2>/dev/null; then
    damage="whose python is gone"
  elif [[ -n $installed && -z $version ]]; then
    damage="whose LibTorch is damaged"
  elif [[ -n $version && $version != "$torch_version" ]]; then
    damage="which holds LibTorch $version: $torch_version takes its place"
  fi
  if [[ -n $damage ]]; then
    say "removing $(place_of_venv), $damage"
    : >"$unfinished"  # the last to go, should this be interrupted too
    find "$venv" -mindepth 1 -maxdepth 1 ! -path "$unfinished" -exec rm -rf {} +
    rm -rf "$venv"
    return 1
  fi
  [[ -n $installed ]] && recipe_suffices "$installed" "$(choose_recipe)" || return 1
  say "LibTorch $version in $(place_of_venv)"
}

install_torch() {
  local recipe what download disk packages free quiet=(--quiet)
  recipe=$(choose_recipe)
  describe_recipe "$recipe"
  local python=3.10
  at_least 2.15 "$torch_version" && python=3.11
  python3 -c "import sys; sys.exit(sys.version_info < (${python/./, }))" ||
    stop "python3 is older than $python, which LibTorch $torch_version needs; name an older one with PACER_LIBTORCH ($oldest needs Python 3.10)."
  say "$what into $(place_of_venv): about $download MB to download, $disk MB on disk"
  free=$(df --output=avail -BM . | tail -n 1 | tr -dc 0-9)
  [[ -e $venv || $free -gt $((disk + download)) ]] ||
    stop "that takes $((disk + download)) MB while it is installed, and this disk has $free MB free."
  mkdir -p "$venv"
  : >"$unfinished"
  rm -f "$recipe_file"
  [[ -e $venv/bin/pip ]] || python3 -m venv "$venv"
  [[ -t 1 ]] && quiet=()
  "$venv/bin/python3" -m pip install --disable-pip-version-check "${quiet[@]}" "${packages[@]}" ||
    stop "pip could not install LibTorch; run this again, or name an existing LibTorch with Torch_DIR."
  [[ $(torch_version_of "$(venv_torch)") == "$torch_version" ]] ||
    stop "pip left no LibTorch $torch_version in $venv; please run this again."
  echo "$recipe" >"$recipe_file"
  rm -f "$unfinished"
  say "LibTorch installed"
}

# Python packages that only tests use. Without them those tests are skipped, so this never fails.
install_readers() {
  local readers=(safetensors==0.8.0 tensorboard==2.21.0 numpy mypy==2.4.1 transformers==5.24.0)
  [[ -x $venv/bin/python3 ]] || return 0
  ! "$venv/bin/python3" -c 'import mypy, numpy, safetensors, tensorboard, transformers' 2>/dev/null || return 0
  say "readers, mypy and transformers for the tests into $(place_of_venv): about 90 MB"
  "$venv/bin/python3" -m pip install --disable-pip-version-check --quiet "${readers[@]}" ||
    say "they could not be installed; tests that need them will be skipped"
}

# Only as root, as it is no reason to stop.
install_doxygen() {
  ! have doxygen && [[ $EUID == 0 ]] && have apt-get || return 0
  (install_packages doxygen) || say "without Doxygen, the test of the reference will be skipped"
}

# --- all of it -------------------------------------------------------------------------------------------------------

# Two scripts started at once must not both install.
mkdir -p build
exec 9>build/set-up.lock
if have flock && ! flock --nonblock 9; then
  say "waiting for another set-up to end"
  flock 9
fi

need_torch=0 torch_prefix=
if [[ -n ${PACER_VENV:-} ]]; then
  use_torch_of_venv || need_torch=1
else
  use_named_torch || use_torch_of_python || use_torch_of_venv || need_torch=1
fi

mapfile -t missing < <(missing_packages)
if ((${#missing[@]})); then
  [[ $EUID != 0 ]] || mapfile -t -O ${#missing[@]} missing < <(missing_comforts)
  install_packages "${missing[@]}"
  mapfile -t missing < <(missing_packages)
  ((${#missing[@]} == 0)) || stop "still missing, or too old in this system's packages: ${missing[*]}"
fi
((!need_torch)) || install_torch
[[ -n ${PACER_VENV:-} ]] || realpath "${torch_prefix:-$(venv_torch)}" >build/libtorch
((!with_readers)) || { install_readers && install_doxygen; }
