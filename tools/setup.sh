#!/usr/bin/env bash
# Installs what the build needs: Debian packages (when root), a venv in the checkout, pinned Python tools.
# Usage: [PYTHON=python3] tools/setup.sh      Quick when nothing is missing. Writes .venv/ and build/tools.env.
# Without PYTHON: the one that .venv was made with, else python3.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
TORCH_VERSION=2.11.0
VENV=.venv
CXX=${CXX:-g++}
if [ -z "${PYTHON:-}" ]; then
  PYTHON=$(head -n 1 $VENV/.fsdpp-stamp 2>/dev/null || true)
  [ -x "$PYTHON" ] || PYTHON=python3
fi

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

[ "$PYTHON" = python3 ] || have "$PYTHON" || die "PYTHON=$PYTHON is not a command; expected a Python 3.10 or newer"

# --- 1. Compiler, headers and small tools, as Debian packages -------------------------------------------------
# package:probe; a probe is a header below /usr/include or /usr/local/include, or a command when it has no dot.
NEEDED="g++:g++ make:make python3:python3 libgtest-dev:gtest/gtest.h libcli11-dev:CLI/CLI.hpp
 libtomlplusplus-dev:toml++/toml.h nlohmann-json3-dev:nlohmann/json.hpp zlib1g-dev:zlib.h"
HELPFUL="ccache:ccache mold:mold" # only make the build faster

present() {
  case "$1" in
    *.h | *.hpp) [ -e "/usr/include/$1" ] || [ -e "/usr/local/include/$1" ] ;;
    *) have "$1" ;;
  esac
}
missing_of() {
  local entry
  for entry in $1; do present "${entry#*:}" || printf '%s ' "${entry%%:*}"; done
}
install_packages() { # $1 needed, $2 helpful
  say "installing $1$2"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q >/dev/null || say "apt-get update failed, trying with the lists at hand"
  # shellcheck disable=SC2086
  [ -z "$2" ] || apt-get install -y -q --no-install-recommends $2 >/dev/null || say "without $2 the build is slower"
  # shellcheck disable=SC2086
  [ -z "$1" ] || apt-get install -y -q --no-install-recommends $1 >/dev/null || die "apt-get could not install: $1"
}
if [ -z "${FSDPP_SKIP_PACKAGES:-}" ]; then
  missing=$(missing_of "$NEEDED")
  helpful=$(missing_of "$HELPFUL")
  # Debian splits venv off its python3; other Pythons carry it.
  "$PYTHON" -c 'import sys; sys.prefix == "/usr" and __import__("ensurepip")' 2>/dev/null || missing="${missing}python3-venv "
  if [ -n "$missing$helpful" ] && [ "$(id -u)" = 0 ] && have apt-get; then
    install_packages "$missing" "$helpful"
  elif [ -n "$missing" ]; then
    die "missing: $missing
  On Debian or Ubuntu:  sudo apt-get install $missing
  Then run the same command again. Where these lie outside /usr, FSDPP_SKIP_PACKAGES=1 skips this check."
  fi
fi
have "$CXX" || die "CXX=$CXX is not a command; expected g++ 12 or newer"
version=$("$CXX" -dumpfullversion -dumpversion | cut -d. -f1)
[ "$version" -ge 12 ] || die "$CXX is version $version, g++ 12 or newer is needed: give CXX=g++-12 (in the environment)"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  die "$PYTHON is $("$PYTHON" -V 2>&1), torch $TORCH_VERSION needs 3.10 or newer: give PYTHON=/path/to/python3"

# --- 2. Python: torch and the build tools, in a venv of the checkout ------------------------------------------
# Folders of packages that $PYTHON sees when it has the right torch, one a line, this checkout's own left out.
packages_with_torch() {
  "$PYTHON" - "$PWD/$VENV/" "$TORCH_VERSION" <<'PY' 2>/dev/null || true
import importlib.metadata, os, sys
own, wanted = sys.argv[1:]
import torch
folders = [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages") and os.path.isdir(p)]
if importlib.metadata.version("torch").split("+")[0] == wanted and not torch.__file__.startswith(own):
    print("\n".join(folders))
PY
}
identity() { "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null || echo none; }

make_venv() {
  local folders clear="" site
  folders=$(packages_with_torch)
  # A venv keeps its old interpreter when it is made over: one of another Python, or with a torch of its own that
  # is not wanted any more, starts from nothing.
  [ "$(identity "$VENV/bin/python")" = "$(identity "$PYTHON")" ] || clear=--clear
  [ -z "$folders" ] || ! compgen -G "$VENV/lib/python3*/site-packages/torch" >/dev/null || clear=--clear
  say "venv in $VENV"
  "$PYTHON" -m venv $clear "$VENV"
  site=$($VENV/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  if [ -n "$folders" ]; then
    say "using torch $TORCH_VERSION of $base"
    printf '%s\n' "$folders" >"$site/fsdpp-torch.pth"
  else
    rm -f "$site/fsdpp-torch.pth"
    $VENV/bin/python -c "import importlib.metadata as m; m.version('torch')" 2>/dev/null ||
      say "installing torch $TORCH_VERSION (about 4.6 GB unpacked)"
    $VENV/bin/python -m pip install -q --disable-pip-version-check "torch==$TORCH_VERSION" ||
      die "pip could not install torch==$TORCH_VERSION; give an interpreter that has it: make PYTHON=/path/to/python3"
  fi
}
# The tool's path: the venv's, else the one beside $PYTHON, else the one on PATH; empty when there is none.
tool() {
  local place
  for place in "$PWD/$VENV/bin/$1" "$(dirname "$base")/$1"; do
    [ ! -x "$place" ] || { echo "$place"; return; }
  done
  command -v "$1" || true
}
install_tools() {
  if ! $VENV/bin/python -m pip install -q --disable-pip-version-check -r tools/requirements.txt; then
    local name
    for name in cmake ctest ninja; do
      [ -n "$(tool $name)" ] || die "pip reached no registry, and $name is not on PATH: install $name"
    done
    $VENV/bin/python -c 'import pytest' 2>/dev/null || say "without pytest only the C++ tests run"
    say "pip reached no registry: using $(tool cmake), $(tool ninja)"
  fi
  mkdir -p build
  local name
  for name in CMAKE=cmake CTEST=ctest NINJA=ninja CLANG_FORMAT=clang-format; do
    printf '%s=%q\n' "${name%%=*}" "$(tool "${name#*=}")"
  done >build/tools.env
}

base=$("$PYTHON" -c 'import sys; print(sys.executable)')
stamp="$base
$TORCH_VERSION $(cksum <tools/requirements.txt) $(cksum <tools/setup.sh)"
if [ "$(cat $VENV/.fsdpp-stamp 2>/dev/null)" != "$stamp" ] || [ ! -x $VENV/bin/python ] || [ ! -f build/tools.env ]; then
  make_venv
  install_tools
  printf '%s' "$stamp" >$VENV/.fsdpp-stamp
fi
