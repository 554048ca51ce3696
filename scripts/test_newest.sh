#!/usr/bin/env bash
# Run every gate and test with the newest versions that pyproject.toml allows: scripts/test.sh in a
# copy of this checkout, whose environments are made anew. Arguments go to pytest.
#   scripts/test_newest.sh
#   scripts/test_newest.sh tests/partition/test_plan_command.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$copy"
cd "$copy"
TANDEM_VERSIONS=newest bash scripts/test.sh "$@"
