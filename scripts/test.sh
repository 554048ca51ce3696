#!/usr/bin/env bash
# Set up everything the tests need, then run every gate. The tests run on all cores. Arguments go to
# pytest, which then runs one test after the other, as those of a GPU or a board must:
#   scripts/test.sh
#   scripts/test.sh -m gpu tests/gpu/test_gpu_engine.py
# TANDEM_TUF_CONFORMANCE: the folder of TUF's conformance suite, which is then run, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
source scripts/test_parts.sh

check_space
make_scratch
install_debian_packages_of_tests
make_venv dev,gpu-build
make_tensorflow_venv

heading "models of wheels (300 MB, once)"
.venv/bin/python tests/fixtures/foreign_models.py

others=$(mktemp)
if (($# == 0)); then
    # Beside the checks below, which use one core. Not in a list of &&: an error has to end it.
    (
        test_oldest
        test_python 3.10 # of JetPack 6, the oldest that Tandem runs on
        test_python 3.12 # of JetPack 7
    ) >"$others" 2>&1 &
    versions=$!
    trap 'kill "$versions" 2>/dev/null' EXIT
fi

heading "ruff format --check"
.venv/bin/ruff format --check .
heading "ruff check"
.venv/bin/ruff check .
heading "mypy"
# The tests are compiled meanwhile: each worker of pytest would do it for itself.
.venv/bin/python -m pytest -q --collect-only >/dev/null 2>&1 &
.venv/bin/mypy
heading "lint-imports"
.venv/bin/lint-imports
if (($# == 0)); then
    failed=0
    wait "$versions" || failed=1
    trap - EXIT
    cat "$others"
    ((failed == 0)) || fail "the tests of other versions failed: their output is above"
fi
rm "$others"
wait
if (($# == 0)) && [[ -n ${TANDEM_TUF_CONFORMANCE:-} ]]; then
    heading "TUF's conformance suite"
    scripts/tuf_conformance.sh "$TANDEM_TUF_CONFORMANCE"
fi
heading "pytest"
if (($# == 0)); then
    # Two for each core: tests wait for brokers, cameras and limits of time for more than half of their
    # time. Builds compile on all cores, too: more than 8 at once would wait for each other.
    cores=$(nproc)
    # A test that fails runs once more, with the same numbers of the fixture rng. A race with a busy
    # machine may pass then; it stands in the summary as RERUN.
    # The limit of time of pyproject.toml counts for each of the two; one that hangs where no signal
    # reaches it ends its worker, which says where.
    set -- -n "$((cores < 4 ? 2 * cores : 8))" --dist worksteal --reruns 1 -raR \
        -o timeout_func_only=true \
        -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true
fi
exec .venv/bin/python -m pytest -m "not slow and not gpu and not jetson" "$@"
