# shellcheck shell=bash
# What the scripts here share; each sources this file first.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
GGML=$ROOT/vendor/llama.cpp/ggml
TOOLCHAINS=$(realpath -m "${PYLLAMA_DFLASH_TOOLCHAINS:-${XDG_CACHE_HOME:-$HOME/.cache}/pyllama_dflash/toolchains}")
JOBS=${JOBS:-$(nproc)}
export HERE GGML JOBS

die() {
  echo "${0##*/}: $*" >&2
  exit 1
}

# begin_sdk NAME PIN... : exits 0 when the SDK stands as this script with these pins makes it, else leaves an
# empty folder $SDK. One SDK is made at a time: a second caller waits and then finds the first one's work.
begin_sdk() {
  SDK=$TOOLCHAINS/$1
  SDK_STAMP=$(cat "$0" <(echo "$@") | sha256sum | cut -d' ' -f1)
  mkdir -p "$TOOLCHAINS"
  exec 9>"$TOOLCHAINS/.lock"
  flock 9
  if [[ -f $SDK/stamp && $(head -n 1 "$SDK/stamp") == "$SDK_STAMP" ]]; then
    exit 0
  fi
  echo "$1: fetching the toolchain into $SDK"
  rm -rf "$SDK"
  mkdir -p "$SDK"
}

# end_sdk VERSIONS : says what was taken and marks the SDK as complete.
end_sdk() {
  printf '%s\n' "$1"
  printf '%s\n' "$SDK_STAMP" "$1" >"$SDK/stamp"
}

# apt_install PACKAGE... : from Debian; nothing happens for what is there.
apt_install() {
  local package missing=()
  for package; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing+=("$package")
  done
  [[ ${#missing[@]} -gt 0 ]] || return 0
  [[ $(id -u) == 0 ]] || die "only root can install packages; missing: ${missing[*]}"
  apt-get update -q >/dev/null || die "apt-get update fails"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null </dev/null ||
    die "apt-get cannot install ${missing[*]}"
}

# unpack_debs SUITE FOLDER PACKAGE... : packages of another Debian suite; apt checks their signatures as always,
# they are unpacked and not installed.
unpack_debs() {
  local suite=$1 folder=$2 apt=$SDK/apt/$1 site deb
  shift 2
  site=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
  [[ -n $site ]] || die "no Debian 12 mirror in apt's sources"
  mkdir -p "$apt/lists/partial" "$apt/debs"
  echo "deb $site $suite main" >"$apt/sources.list"
  local options=(-q -o "Dir::Etc::sourcelist=$apt/sources.list" -o Dir::Etc::sourceparts=-
    -o "Dir::State::lists=$apt/lists" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update >/dev/null || die "no package list of Debian $suite"
  (cd "$apt/debs" && apt-get "${options[@]}" download "$@" >/dev/null) || die "Debian $suite lacks one of: $*"
  for deb in "$apt"/debs/*.deb; do
    dpkg-deb -x "$deb" "$folder"
    basename "$deb" .deb >>"$SDK/versions"
  done
  rm -rf "$apt"
}

# pip_install REQUIREMENT... : wheels into a virtual environment at $SDK.
pip_install() {
  [[ -x $SDK/bin/python ]] || python3 -m venv "$SDK" ||
    die "python3 -m venv fails (Debian: apt-get install python3-venv)"
  "$SDK/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile --only-binary :all: \
    "$@" </dev/null || die "pip cannot install $*"
}

# installed_wheels REGEX : names and versions on one line.
installed_wheels() {
  "$SDK/bin/python" -m pip list --disable-pip-version-check --format freeze | grep -E "$1" | paste -sd ' '
}
