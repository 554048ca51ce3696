#!/usr/bin/env bash
# Set up everything the tests need, then run every gate. The tests run on all cores. Arguments go to
# pytest, which then runs one test after the other, as those of a GPU or a board must:
#   scripts/test.sh
#   scripts/test.sh -m gpu tests/test_gpu_engine.py
# TANDEM_TUF_CONFORMANCE: the folder of TUF's conformance suite, which is then run, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

# What the tests start as programs or load from the system, by Debian package name.
debian_packages=(
    chromium
    mosquitto
    mosquitto-clients
    openssh-client
    openssh-server
    lrzsz
    faketime
    ffmpeg
    gstreamer1.0-tools
    gstreamer1.0-plugins-base
    gstreamer1.0-plugins-good
    gstreamer1.0-plugins-bad
    gstreamer1.0-plugins-ugly
    gstreamer1.0-libav
    gir1.2-gst-rtsp-server-1.0
    gir1.2-gst-plugins-base-1.0
    python3-gst-1.0
    python3-gi
    docker-registry
    postgresql
    rabbitmq-server
    shellcheck
    sudo
)

install_debian_packages() {
    local missing=() package
    for package in "$@"; do
        if ! dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q ' installed$'; then
            missing+=("$package")
        fi
    done
    if ((${#missing[@]} == 0)); then
        return
    fi
    local root=()
    if ((EUID != 0)); then
        if ! command -v sudo >/dev/null; then
            fail "the tests need ${missing[*]}: run 'apt-get install ${missing[*]}' as root"
        fi
        root=(sudo)
    fi
    heading "apt-get install ${missing[*]}"
    "${root[@]}" apt-get update -q
    # No recommended packages: mosquitto's service and desktop plugins are not wanted here.
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends "${missing[@]}"
}

# The oldest NumPy that pyproject.toml and OpenCV's wheel allow on a Python.
oldest_numpy() {
    case $1 in
        3.10) echo 1.23.0 ;;
        3.11) echo 1.23.5 ;;
        3.12) echo 1.26.0 ;;
        *) echo 2.1.0 ;;
    esac
}

# Run the demo with what the host's extra brings and no more, and the tests of INT8 and of sessions
# with the oldest NumPy, both in .venv-oldest.
test_host_and_oldest_numpy() {
    local version numpy stamp out
    version=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    numpy=$(oldest_numpy "$version")
    stamp=.venv-oldest/.tandem-$numpy-$(sha256sum pyproject.toml | cut -c 1-16)
    if [[ ! -e $stamp ]]; then
        heading "pip install -e '.[host]' numpy==$numpy"
        rm -rf .venv-oldest
        .venv/bin/python -m venv .venv-oldest
        # The bounds name the last releases for NumPy 1: pip takes minutes to find them itself.
        .venv-oldest/bin/python -m pip install -q --disable-pip-version-check --prefer-binary \
            -e '.[host]' "numpy==$numpy" hypothesis pytest pytest-timeout \
            'opencv-python-headless<4.12' 'onnx<1.20' 'onnxruntime<1.24' 'scipy<1.15'
        touch "$stamp"
    fi
    heading "tandem demo with the packages of the host and NumPy $numpy"
    out=$(mktemp -d)
    .venv-oldest/bin/tandem demo --out "$out" >"$out/log" 2>&1 || {
        cat "$out/log" >&2
        fail "tandem demo ended with an error: its output is above"
    }
    rm -rf "$out"
    heading "pytest with NumPy $numpy"
    .venv-oldest/bin/python -m pytest -q tests/test_quantize.py tests/test_threshold.py \
        tests/test_trial.py tests/test_output_losses.py tests/test_accept_loss.py \
        tests/test_session_arrays.py
}

# A Python of this version, from the PATH or pyenv; empty if there is none.
find_python_version() {
    local candidate
    for candidate in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/"python$1"; do
        if "$candidate" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' \
            "$1" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

# What a board and a fleet's server install, on a version of Python in .venv-VERSION: the command
# starts, every module imports, and real agents take signed releases.
test_python() {
    local version=$1 python stamp venv=.venv-$1
    python=$(find_python_version "$version")
    if [[ -z $python ]]; then
        echo "There is no Python $version here: that Tandem starts on it is not tested." >&2
        return
    fi
    stamp=$venv/.tandem-$(cat pyproject.toml scripts/test.sh | sha256sum | cut -c 1-16)
    if [[ ! -e $stamp ]]; then
        heading "pip install -e '.[camera,fleet]' on Python $version"
        rm -rf "$venv"
        "$python" -m venv "$venv"
        "$venv"/bin/python -m pip install -q --disable-pip-version-check \
            -e '.[camera,fleet]' hypothesis pytest pytest-timeout
        touch "$stamp"
    fi
    heading "tandem --help on Python $version"
    "$venv"/bin/tandem --help >/dev/null
    heading "import every module of the board on Python $version"
    "$venv"/bin/python - <<'END'
from importlib import import_module
from pathlib import Path

for package in ("configs", "device", "pipelines"):
    for path in sorted(Path(package).rglob("*.py")):
        import_module(".".join(path.with_suffix("").parts))
END
    heading "pytest of updates and fleets on Python $version"
    # conftest.py is for models: it needs onnx.
    "$venv"/bin/python -m pytest -q --noconftest -m "not slow" tests/test_stolen_parts.py \
        tests/test_trust_attacks.py tests/test_rollout_machine.py tests/test_rollout_rules.py \
        tests/test_release_decisions.py tests/test_transfer.py tests/test_update_sources.py \
        tests/test_fleet_folder.py tests/test_fleet_endings.py \
        tests/test_messages.py
}

if command -v dpkg-query >/dev/null; then
    install_debian_packages "${debian_packages[@]}"
else
    echo "This is not Debian: tests that need mosquitto, ffmpeg or GStreamer may fail." >&2
fi
make_venv dev,gpu-build
make_tensorflow_venv

heading "models of wheels (200 MB, once)"
.venv/bin/python tests/foreign_models.py

heading "ruff format --check"
.venv/bin/ruff format --check .
heading "ruff check"
.venv/bin/ruff check .
heading "mypy"
.venv/bin/mypy
heading "lint-imports"
.venv/bin/lint-imports
if (($# == 0)); then
    test_host_and_oldest_numpy
    test_python 3.10 # of JetPack 6, the oldest that Tandem runs on
    test_python 3.12 # of JetPack 7
fi
if (($# == 0)) && [[ -n ${TANDEM_TUF_CONFORMANCE:-} ]]; then
    heading "TUF's conformance suite"
    scripts/tuf_conformance.sh "$TANDEM_TUF_CONFORMANCE"
fi
heading "pytest"
if (($# == 0)); then
    # One more than cores: some tests wait for brokers, cameras and limits of time. Builds compile on
    # all cores, too: more than 8 at once would wait for each other.
    cores=$(nproc)
    set -- -n "$((cores < 8 ? cores + 1 : 8))" --dist worksteal
fi
exec .venv/bin/python -m pytest -m "not slow and not gpu and not jetson" "$@"
