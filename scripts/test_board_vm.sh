#!/usr/bin/env bash
# Boot a whole board under qemu and test it: kernel, systemd, `tandem board init` over SSH, the unit, a
# camera of vivid, updates, and power that is cut in each phase of one. Needs root, and Debian's
# mmdebstrap, qemu-system-arm or qemu-system-x86, qemu-utils and, for arm64 elsewhere, qemu-user-static.
#   scripts/test_board_vm.sh                                  # Debian 12 (systemd 252), arm64
#   scripts/test_board_vm.sh --arch amd64                     # the same in less time
#   scripts/test_board_vm.sh --suite trixie --arch amd64    # Debian 13 (systemd 257)
# Two more suites have Debian 12 with another systemd: 247 of Debian 11, 254 of its own backports.
# `--help` says the rest. The images are kept, the machine is not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -x .venv/bin/python ]]; then
    python=.venv/bin/python
else
    python=python3
fi
exec "$python" -m scripts.board_vm "$@"
