#!/usr/bin/env bash
# Boot a whole board under qemu and test it: kernel, systemd, `tandem board init` over SSH, the unit, a
# camera of vivid, updates, and power that is cut in each phase of one. Needs root, and Debian's
# mmdebstrap, qemu-system-arm or qemu-system-x86, qemu-utils and, for arm64 elsewhere, qemu-user-static.
#   scripts/test_board_vm.sh                                  # Debian 12 (systemd 252), arm64
#   scripts/test_board_vm.sh --arch amd64                     # the same in less time
#   TANDEM_MIRROR=URL scripts/test_board_vm.sh --suite jammy --arch amd64 --keyring FILE
# The last is Ubuntu 22.04 (systemd 249), the user land of JetPack 6; noble is that of JetPack 7 (255).
# `--help` says the rest. The images are kept, the machine is not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -x .venv/bin/python ]]; then
    python=.venv/bin/python
else
    python=python3
fi
exec "$python" -m scripts.board_vm "$@"
