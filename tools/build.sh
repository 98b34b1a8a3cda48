#!/usr/bin/env bash
# Configures (when needed) and builds one preset.  Usage: tools/build.sh release [target ...]
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
preset=${1:?preset}
shift
[ -f build/tools.env ] || { echo "build: build/tools.env is missing: run tools/setup.sh first" >&2; exit 1; }
# shellcheck source=/dev/null
. build/tools.env
# ccache: the precompiled header is shared, and another checkout of the same sources hits too.
export CXX=${CXX:-g++} CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1
configured=build/$preset/.fsdpp-configured # newer than tools.env, or set-up has changed the tools or torch since
[ "$configured" -nt build/tools.env ] || {
  rm -f "$configured"
  "$CMAKE" --preset "$preset" -DCMAKE_MAKE_PROGRAM="$NINJA"
  touch "$configured"
}
# nproc would take OMP_NUM_THREADS, which is 1 for the ranks, for its own.
"$CMAKE" --build "build/$preset" --parallel "$(env -u OMP_NUM_THREADS nproc)" ${1:+--target "$@"}
