#!/usr/bin/env bash
# Print the package mirror that this machine's apt has for a release of Debian, or for another one: a
# mirror has them all. TANDEM_MIRROR overrides it. Scripts that make a root file system take packages
# from there.
#   scripts/apt_mirror.sh bookworm
set -euo pipefail

release=$1
if [[ -n ${TANDEM_MIRROR:-} ]]; then
    echo "$TANDEM_MIRROR"
    exit
fi
mirror=""
if command -v apt-get >/dev/null; then
    for known in "Release: $release" 'Label: Debian'; do
        # shellcheck disable=SC2016  # apt fills that in
        mirror=${mirror:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' \
            "$known" 'Component: main' | sed -n 1p)}
    done
fi
if [[ -z $mirror ]]; then
    echo "apt_mirror: apt knows no mirror of Debian ($release) here: name one in TANDEM_MIRROR" >&2
    exit 1
fi
echo "$mirror"
