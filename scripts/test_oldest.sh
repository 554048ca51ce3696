#!/usr/bin/env bash
# Run the demo and the tests of models, plans and engines with the oldest versions that
# pyproject.toml allows (configs/locks/oldest-*), and a build with a Triton that is too old.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
source scripts/test_parts.sh

make_venv dev,gpu-build
test_oldest "$@"
test_old_triton
