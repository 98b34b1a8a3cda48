#!/usr/bin/env bash
# Trains.  Usage: tools/train.sh PRESET RANKS CONFIG TEXT [ARGS...]     An empty TEXT: the dictionary of fetch_text.sh.
# On CPUs, whatever the machine has, unless ARGS say --device cuda or --device auto.
set -euo pipefail
if [ $# -lt 4 ]; then
  echo "usage: tools/train.sh PRESET RANKS CONFIG TEXT [ARGS...]" >&2
  exit 2
fi
preset=$1 ranks=$2 config=$3 text=$4
shift 4
root=$(dirname "$(dirname "$(readlink -f "$0")")")
from_root() { realpath -m --relative-base="$root" -- "$1"; } # paths are given from where the caller stands
config=$(from_root "$config")
[ -z "$text" ] || text=$(from_root "$text")
cd "$root"
[ -n "$text" ] || text=$(tools/fetch_text.sh)
exec "build/$preset/apps/fsdpp/fsdpp" train --device cpu --config "$config" --ranks "$ranks" \
  --data.text "$text" "$@"
