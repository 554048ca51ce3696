#!/usr/bin/env bash
# The whole way on this machine: build, deploy over MQTT, run, watch. Arguments go to `tandem demo`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

make_venv host
exec .venv/bin/tandem demo "$@"
