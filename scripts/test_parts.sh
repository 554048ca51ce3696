# Sourced by scripts/test.sh, test_oldest.sh and test_newest.sh after venv.sh: what they have in common.
# shellcheck shell=bash

# Programs that the tests start would compile every module of Tandem again.
unset PYTHONDONTWRITEBYTECODE

# MB of each environment, with the models and the caches beside them, once it is made.
declare -A environment_mb=(
    [.venv]=3600 [.venv-tensorflow]=1600 [.venv-oldest]=600 [.venv-3.10]=450 [.venv-3.12]=450
    [.models]=300 [.mypy_cache]=200
)
# MB of temporary files: packages that pip unpacks, then what eight workers of pytest hold at most.
temporary_mb=3000

# check_free FOLDER MB: an error where its file system has fewer free.
check_free() {
    local free
    free=$(($(df -Pk "$1" | awk 'END { print $4 }') * 1024 / 1000000))
    if ((free < $2)); then
        fail "the tests need $2 MB in $1 and $free MB are free there: make space$3"
    fi
}

# Say how much space the tests need, and end where there is less. What is made already is not counted.
check_space() {
    local needed=0 name temporary=${TMPDIR:-/tmp}
    for name in "${!environment_mb[@]}"; do
        if [[ ! -e $name ]]; then
            ((needed += environment_mb[$name]))
        fi
    done
    echo "The tests need $needed MB in $PWD and $temporary_mb MB in $temporary."
    if [[ $(stat -c %d .) == $(stat -c %d "$temporary") ]]; then
        check_free "$PWD" $((needed + temporary_mb)) ", or set TMPDIR to a folder of another disk"
    else
        check_free "$PWD" "$needed" ""
        check_free "$temporary" "$temporary_mb" ", or set TMPDIR to a folder of another disk"
    fi
}

# Set TMPDIR to a folder that goes when this process ends, whatever ends it: programs that are killed
# leave files there. pytest holds its own folders elsewhere, as it keeps those of tests that failed.
make_scratch() {
    local lock pid
    export PYTEST_DEBUG_TEMPROOT=${TMPDIR:-/tmp}
    TMPDIR=$(mktemp -d "$PYTEST_DEBUG_TEMPROOT/tandem-XXXXXX")
    export TMPDIR
    chmod 711 "$TMPDIR" # PostgreSQL's folder is of another user
    # No child of this process, which waits for all of its children.
    # shellcheck disable=SC2016
    (setsid sh -c 'tail --pid="$1" -f /dev/null; rm -rf "$2"' - $$ "$TMPDIR" </dev/null &>/dev/null &)
    # Of runs of pytest that were killed: it would keep each for three days.
    for lock in "$PYTEST_DEBUG_TEMPROOT/pytest-of-$(id -un)"/pytest-*/.lock; do
        if pid=$(cat "$lock" 2>/dev/null) && [[ -n $pid ]] && ! kill -0 "$pid" 2>/dev/null; then
            rm -rf "${lock%/.lock}"
        fi
    done
}

# What the tests start as programs or load from the system, by Debian package name.
debian_packages=(
    chromium
    clang
    curl
    cyclonedds-dev
    cyclonedds-tools
    default-jre-headless
    fastddsgen
    g++
    g++-aarch64-linux-gnu
    libclang-rt-dev
    libfastrtps-dev
    libxxhash-dev
    mosquitto
    mosquitto-clients
    openssh-client
    openssh-server
    lintian
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
    gstreamer1.0-python3-plugin-loader
    python3-gst-1.0
    python3-gi
    python3-venv
    docker-registry
    nats-server
    nghttp2-client
    postgresql
    prometheus
    qemu-user-static
    rabbitmq-server
    shellcheck
    sudo
    systemd
    valgrind
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

# Run the demo with what the host's extra brings and no more, and tests of each package, with the
# oldest versions that pyproject.toml allows, in .venv-oldest. Arguments go to pytest.
test_oldest() {
    make_environment .venv-oldest .venv/bin/python oldest '.[host]' hypothesis pytest pytest-timeout
    heading "tandem demo with the oldest packages of the host"
    local out
    out=$(mktemp -d)
    .venv-oldest/bin/tandem demo --out "$out" >"$out/log" 2>&1 || {
        cat "$out/log" >&2
        fail "tandem demo ended with an error: its output is above"
    }
    rm -rf "$out"
    heading "pytest with the oldest packages of the host"
    .venv-oldest/bin/python -m pytest -q -m "not slow" tests/quantize/test_quantize.py \
        tests/quantize/test_threshold.py tests/quantize/test_trial.py tests/quantize/test_output_losses.py \
        tests/quantize/test_accept_loss.py tests/runtime/test_session_arrays.py "$@"
}

# A build with a Triton below the bound of the extra `gpu-build` says that, and no more.
test_old_triton() {
    local folder=.venv-oldest/triton-3.6.0 out
    if [[ ! -d $folder ]]; then
        heading "pip install triton==3.6.0 in $folder"
        .venv-oldest/bin/python -m pip install -q --disable-pip-version-check --no-deps \
            --target "$folder" triton==3.6.0
    fi
    heading "tandem build with Triton 3.6"
    out=$(mktemp -d)
    PYTHONPATH=$folder .venv-oldest/bin/python -m pytest -q tests/gpu/test_gpu_compile.py -k too_old \
        >"$out/log" || {
        cat "$out/log" >&2
        fail "a build with Triton 3.6 does not say that it is too old"
    }
    rm -rf "$out"
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
    local version=$1 python venv=.venv-$1
    python=$(find_python_version "$version")
    if [[ -z $python ]]; then
        echo "There is no Python $version here: that Tandem starts on it is not tested." >&2
        return
    fi
    make_environment "$venv" "$python" dev '.[camera,dds,fleet,foxglove,mcap,ros2,serve]' \
        hypothesis pytest pytest-rerunfailures pytest-timeout
    heading "tandem --help on Python $version"
    "$venv"/bin/tandem --help >/dev/null
    heading "import every module of the board on Python $version"
    "$venv"/bin/python - <<'END'
from importlib import import_module
from pathlib import Path

for package in ("configs", "device", "pipelines"):
    for path in sorted(Path(package).rglob("*.py")):
        if "gstreamer/python" in str(path):
            continue  # of GStreamer's Python
        import_module(".".join(path.with_suffix("").parts))
END
    heading "pytest of updates and fleets on Python $version"
    # conftest.py is for models: it needs onnx.
    "$venv"/bin/python -m pytest -q --noconftest --reruns 1 -raR -m "not slow" \
        tests/fleet/test_stolen_parts.py tests/fleet/test_trust_attacks.py tests/fleet/test_rollout_machine.py tests/fleet/test_rollout_rules.py \
        tests/agent/test_release_decisions.py tests/agent/test_transfer.py tests/agent/test_update_sources.py \
        tests/fleet/test_fleet_folder.py tests/fleet/test_fleet_expiry.py \
        tests/repository/test_messages.py
}

install_debian_packages_of_tests() {
    if command -v dpkg-query >/dev/null; then
        install_debian_packages "${debian_packages[@]}"
    else
        echo "This is not Debian: tests that need mosquitto, ffmpeg or GStreamer may fail." >&2
    fi
}
