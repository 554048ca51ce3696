#!/usr/bin/env bash
# Test the agent in a Debian arm64 user land under qemu: its wheels install, it starts, runs a
# portable pipeline on a file, takes an update, and rolls one back. Needs root, and Debian's
# debootstrap and qemu-user-static. It takes half an hour the first time; the root is kept.
#   scripts/test_arm64.sh
# TANDEM_ARM64_ROOT: where the root is (default: ~/.cache/tandem/arm64). TANDEM_MIRROR: where its
# packages come from (default: where apt takes those of this machine).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

suite=bookworm
root=${TANDEM_ARM64_ROOT:-$HOME/.cache/tandem/arm64}

fail() {
    echo "test_arm64: $1" >&2
    exit 1
}

((EUID == 0)) || fail "run it as root: it makes a root file system and enters it"
# What this script makes anew it removes first: only a root that it has begun.
if [[ -d $root && -n $(ls -A "$root") && -z $(compgen -G "$root/.tandem-*") ]]; then
    fail "$root is not a root of this script: name a new or empty folder in TANDEM_ARM64_ROOT"
fi
for program in debootstrap qemu-aarch64-static unshare; do
    command -v "$program" >/dev/null ||
        fail "$program is missing: apt-get install debootstrap qemu-user-static util-linux"
done

# The kernel hands programs of arm64 to qemu by binfmt_misc; Debian's packages register that.
if [[ $(uname -m) != aarch64 && ! -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]]; then
    if [[ ! -e /proc/sys/fs/binfmt_misc/register ]]; then
        mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc ||
            fail "this machine does not allow binfmt_misc: run it where root may mount that"
    fi
    update-binfmts --enable qemu-aarch64 ||
        fail "qemu-aarch64 cannot be registered: apt-get install binfmt-support"
fi

if [[ ! -e $root/.tandem-$suite ]]; then
    mirror=$(scripts/apt_mirror.sh "$suite")
    echo "debootstrap $suite arm64 into $root" >&2
    rm -rf "$root"
    mkdir -p "$root"
    touch "$root/.tandem-begun"
    debootstrap --arch=arm64 --variant=minbase --foreign \
        --include=python3,python3-venv,ca-certificates "$suite" "$root" "$mirror"
    chroot "$root" /debootstrap/debootstrap --second-stage
    touch "$root/.tandem-$suite"
fi

if [[ -x .venv/bin/python ]]; then
    python=.venv/bin/python
else
    python=python3
fi
TANDEM_ARM64_ROOT=$root exec "$python" -m pytest -m slow -p no:cacheprovider "$@" \
    tests/boards/test_arm64.py
