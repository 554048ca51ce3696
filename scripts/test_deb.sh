#!/usr/bin/env bash
# Install, upgrade, remove and purge the agent's Debian package in another release or architecture:
# real dpkg, Python and pip there, below qemu where the processor is another one; systemctl alone is
# a double. Needs root and debootstrap, whose options may follow. The root is kept.
#   scripts/test_deb.sh bookworm arm64
#   TANDEM_MIRROR=URL scripts/test_deb.sh jammy amd64 --components=main,universe
# For arm64 run scripts/test_arm64.sh once, which lets the kernel hand its programs to qemu.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

suite=$1 architecture=$2
shift 2
root=${TANDEM_DEB_ROOT:-$HOME/.cache/tandem/deb-$suite-$architecture}

if [[ ! -e $root/.tandem-made ]]; then
    if [[ -d $root && -n $(ls -A "$root") ]]; then
        echo "test_deb: $root is no root of this script: remove it, or name an empty folder in TANDEM_DEB_ROOT" >&2
        exit 1
    fi
    mirror=$(scripts/apt_mirror.sh "$suite")
    include=python3,python3-venv,adduser,systemd
    debootstrap --arch="$architecture" --variant=minbase --include="$include" "$@" \
        "$suite" "$root" "$mirror"
    touch "$root/.tandem-made"
fi

if [[ -x .venv/bin/python ]]; then
    python=.venv/bin/python
else
    python=python3
fi
TANDEM_DEB_ROOT=$root exec "$python" -m pytest -m slow -p no:cacheprovider \
    tests/scripts/test_make_deb.py -k "install_upgrade or failed_upgrade"
