#!/usr/bin/env bash
# Print the package mirror that this machine's apt has for a release of Debian, which TANDEM_MIRROR
# overrides. Scripts that make a root file system take packages from there.
#   scripts/apt_mirror.sh bookworm
set -euo pipefail

release=$1
if [[ -n ${TANDEM_MIRROR:-} ]]; then
    echo "$TANDEM_MIRROR"
    exit
fi
mirror=""
# shellcheck disable=SC2016  # apt fills that in
if command -v apt-get >/dev/null; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' \
        "Release: $release" 'Component: main' | sed -n 1p)
fi
if [[ -z $mirror ]]; then
    echo "apt_mirror: apt knows no mirror of $release here: name one in TANDEM_MIRROR" >&2
    exit 1
fi
echo "$mirror"
