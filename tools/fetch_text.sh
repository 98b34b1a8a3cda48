#!/usr/bin/env bash
# Brings the text that `make train` learns: a dictionary of English, the Debian package dict-gcide, unpacked without
# installing it (no root, no server).  Usage: tools/fetch_text.sh      Prints the path of the text, once it is there.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
PACKAGE=dict-gcide
TEXT=build/data/usr/share/dictd/gcide.dict.dz

say() { printf 'text: %s\n' "$*" >&2; }
die() { say "$*
  Remedy: train on a text of your own, a file, folder or .gz: make train TEXT=path"; exit 1; }

if [ ! -s $TEXT ]; then
  for command in apt-get dpkg-deb; do
    command -v $command >/dev/null || die "$command is not on this machine, so $PACKAGE cannot be fetched"
  done
  work=$PWD/build/data.part
  trap 'rm -rf "$work"' EXIT
  rm -rf "$work"
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/root"
  download() { (cd "$work" && apt-get -q -o APT::Sandbox::User="$(id -un)" "$@" download $PACKAGE >>"$work/log" 2>&1); }
  say "fetching $PACKAGE, a dictionary of English, 40 MB of text"
  if ! download; then
    # The machine's package lists are missing or old: take new ones into a folder of our own, which needs no root.
    own=(-o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" -o Debug::NoLocking=1
      -o APT::Sandbox::User="$(id -un)")
    apt-get -q "${own[@]}" update >>"$work/log" 2>&1 || true
    download "${own[@]}" || die "apt-get could not download $PACKAGE: $(grep -m1 '^E:' "$work/log" || tail -n1 "$work/log")"
  fi
  dpkg-deb -x "$work"/$PACKAGE*.deb "$work/root"
  [ -s "$work/root/${TEXT#build/data/}" ] || die "$PACKAGE holds no ${TEXT#build/data/}"
  rm -rf build/data
  mv "$work/root" build/data
fi
printf '%s\n' "$TEXT"
