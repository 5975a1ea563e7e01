#!/usr/bin/env bash
# run.sh CASE SOURCE BUILD WORK LIBTORCH WITH_CUDA: uses pacer as another project would.
#   find_package      installs BUILD, then builds and runs a project that finds it, without nvcc
#                     and ships its program as docs/faq.md says
#   pkg_config        installs BUILD, then builds and runs a program with the flags of pkg-config
#   package           packs BUILD, then builds and runs a project that finds pacer in the unpacked Debian package
#   other_torch       that project is told, in one sentence, that another LibTorch does not fit
#   torch_range       pacer itself refuses a LibTorch that is too old in one sentence, and warns of one that nobody has tried
#   add_subdirectory  builds and runs a project that contains pacer and links its lowest folders, which are quick to compile
#   fetch_content     configures a project that fetches pacer, here from SOURCE and as a shared library
set -euo pipefail
kind=$1 source=$2 build=$3 work=$4 libtorch=$5 with_cuda=$6
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
rm -rf "$work"
mkdir -p "$work"

fail() {
  echo "$1"
  exit 1
}

skip() {
  echo "PACER_SKIPPED: $1"
  exit
}

# configure PROJECT [ARGUMENT...]
configure() {
  local project=$1
  shift
  cmake -S "$here/$project" -B "$work/build" -G Ninja -DCMAKE_CXX_FLAGS="-O0 -Wall -Wextra -Werror ${all_of_pacer:-}" "$@"
}

build_and_run() {
  cmake --build "$work/build" --parallel 2
  "$work/build/consumer"
}

# ship: the program, and LibTorch in the layout of docs/faq.md, here with links in place of copies.
ship() {
  local bundle=$work/bundle
  cmake --install "$work/build" --prefix "$bundle" >>"$work/install.log"
  mkdir -p "$bundle/lib/torch"
  cp -as "$libtorch/lib" "$bundle/lib/torch/lib"
  rm -f "$bundle/lib/torch/lib/libtorch_python.so"
  [[ ! -d $libtorch/../nvidia ]] || cp -as "$(cd "$libtorch/../nvidia" && pwd)" "$bundle/lib/nvidia"
  "$bundle/bin/consumer"
  ! ldd "$bundle/bin/consumer" | grep -E "not found|=> $libtorch" || fail "The shipped program looks for LibTorch outside."
}

# As docs/faq.md has it.
run_path='$ORIGIN/../lib/torch/lib;$ORIGIN/../lib/nvidia/cu13/lib;$ORIGIN/../lib/nvidia/nccl/lib'

install() { cmake --install "$build" --prefix "$work/installed" >"$work/install.log"; }

# fake_torch VERSION: as much of a LibTorch as is looked at for its version.
fake_torch() {
  local header=$work/torch-$1/include/torch/headeronly
  mkdir -p "$header" "$work/torch-$1/share/cmake/Caffe2"
  : >"$work/torch-$1/share/cmake/Caffe2/Caffe2Targets.cmake"
  printf '#define TORCH_VERSION_%s\n' "MAJOR $(cut -d. -f1 <<<"$1")" "MINOR $(cut -d. -f2 <<<"$1")" \
    "PATCH $(cut -d. -f3 <<<"$1")" >"$header/version.h"
}

# said SENTENCE: what configure has left in the log, its line breaks aside, has this extended regular expression.
said() {
  tr -s '\n ' ' ' <"$work/log" | grep -oE "$1" || fail "This was not said: $1; but: $(cat "$work/log")"
}

case $kind in
  find_package)
    install
    mv "$work/installed" "$work/moved"  # an installation may be moved
    all_of_pacer=-DALL_OF_PACER
    # A compiler that cannot run: nothing may ask for nvcc.
    CUDACXX=/bin/false configure find_package -Dpacer_ROOT="$work/moved" -DCMAKE_INSTALL_RPATH="$run_path" | tee "$work/log"
    grep -q "PACER_WITH_CUDA=$with_cuda" "$work/log" || fail "The package does not say that it has CUDA: $with_cuda."
    ! grep -q "CMAKE_CUDA_COMPILER:" "$work/build/CMakeCache.txt" || fail "The consumer had to enable CUDA."
    ! find "$work/moved/include" -path '*detail*' | grep . || fail "Private headers were installed."
    build_and_run
    ship
    ;;
  pkg_config)
    command -v pkg-config >/dev/null || skip "there is no pkg-config"
    install
    mv "$work/installed" "$work/moved"
    export PKG_CONFIG_PATH=$work/moved/lib/pkgconfig
    read -ra flags < <(pkg-config --cflags --libs pacer)
    "${CXX:-g++}" -O0 -Wall -Wextra -Werror "$here/main.cpp" -o "$work/consumer" "${flags[@]}"
    "$work/consumer"
    pkg-config --define-variable=torch_prefix=/another/torch --libs pacer | grep -q -- "-L/another/torch/lib" ||
      fail "pkg-config cannot be told where LibTorch lies."
    ;;
  package)
    command -v cpack >/dev/null && command -v dpkg-deb >/dev/null || skip "there is no cpack or no dpkg-deb"
    [[ -e $build/CPackConfig.cmake ]] || skip "there are no packages of the shared form"
    mkdir "$work/packages" "$work/archive"
    # In a folder of its own: cpack leaves a log of what it does where it is started.
    (cd "$work/packages" && cpack --config "$build/CPackConfig.cmake" -G "TGZ;DEB" -B "$work/packages")
    dpkg-deb --info "$work"/packages/libpacer-dev_*.deb | grep "comes from pip" || fail "The package does not say where LibTorch comes from."
    dpkg-deb -x "$work"/packages/libpacer-dev_*.deb "$work/root"
    tar -xf "$work"/packages/pacer-*.tar.gz -C "$work/archive" --strip-components=1
    diff -r "$work/archive" "$work/root/usr" || fail "The archive and the Debian package differ."
    install
    diff -r "$work/installed/include" "$work/root/usr/include" || fail "The package has other headers than an installation."
    ! grep -rnIF -e "$source" -e "$build" -e "$libtorch" -e "$(dirname "$libtorch")/nvidia" "$work/root" ||
      fail "The package has a path of the machine that packed it."
    configure find_package -Dpacer_ROOT="$work/root/usr" -DTorch_DIR="$libtorch/share/cmake/Torch"
    build_and_run
    if command -v pkg-config >/dev/null; then  # the same object, linked by the package's other file
      export PKG_CONFIG_PATH=$work/root/usr/lib/pkgconfig
      read -ra flags < <(pkg-config --define-variable=torch_prefix="$libtorch" --libs pacer)
      "${CXX:-g++}" "$(find "$work/build" -name main.cpp.o)" -o "$work/linked" "${flags[@]}"
      "$work/linked"
    fi
    ;;
  other_torch)
    install
    fake_torch 2.99.0
    ! configure find_package -Dpacer_ROOT="$work/installed" -DTorch_DIR="$work/torch-2.99.0/share/cmake/Torch" \
      >"$work/log" 2>&1 || fail "LibTorch 2.99 was accepted."
    said 'pacer: this pacer was built with LibTorch 2\.[0-9]+, .* but [^ ]* holds 2\.99\.0; build pacer again .*with Torch_DIR\.'
    ;;
  torch_range)
    try() { configure add_subdirectory -DPACER_SOURCE_DIR="$source" -DTorch_DIR="$work/torch-$1/share/cmake/Torch" "${@:2}" >"$work/log" 2>&1; }
    fake_torch 2.10.9
    ! try 2.10.9 || fail "LibTorch 2.10 was accepted."
    said 'pacer: it is made for LibTorch 2\.11\.0 to 2\.[0-9]+\.[0-9]+, but [^ ]* holds 2\.10\.9; name another one with Torch_DIR, or let cmake/bootstrap\.sh install one\.'
    fake_torch 2.99.0
    try 2.99.0 || true  # there is nothing in it to build with
    said 'CMake Warning at [^ ]*LibTorch.cmake:[0-9]+ \(message\): pacer: LibTorch 2\.99\.0 in [^ ]* is newer than 2\.[0-9]+\.[0-9]+, the newest that pacer is tested with;'
    ! try 2.99.0 -DPACER_LIBTORCH_STRICT=ON || fail "PACER_LIBTORCH_STRICT has no effect."
    said 'pacer: it is made for LibTorch .*, but [^ ]* holds 2\.99\.0;'
    ;;
  add_subdirectory)
    configure add_subdirectory -DPACER_SOURCE_DIR="$source" -DTorch_DIR="$libtorch/share/cmake/Torch" \
      -DPACER_CUDA=OFF -DPACER_UNITY=ON
    build_and_run
    ;;
  fetch_content)
    configure fetch_content -DPACER_SOURCE_DIR="$source" -DTorch_DIR="$libtorch/share/cmake/Torch" \
      -DBUILD_SHARED_LIBS=ON -DPACER_CUDA=OFF | tee "$work/log"
    grep -q "pacer is a SHARED_LIBRARY" "$work/log" || fail "BUILD_SHARED_LIBS of the project does not count."
    ;;
esac
rm -rf "$work"
