# Sourced by the other scripts, from the repository root: the virtual environment in .venv.

heading() {
    printf '\n== %s\n' "$*"
}

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in python3.12 python3.11 python3.10 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Tandem needs Python 3.10 or newer and none is on the PATH: install python3.10 or newer"
}

# make_venv EXTRA: .venv with tandem-edge[EXTRA], made again only when pyproject.toml changed.
make_venv() {
    local extra=$1 stamp python
    stamp=".venv/.tandem-$extra-$(sha256sum pyproject.toml | cut -c 1-16)"
    if [[ -e $stamp ]]; then
        return
    fi
    if [[ ! -x .venv/bin/python ]]; then
        python=$(find_python)
        heading "$python -m venv .venv"
        "$python" -m venv .venv || {
            rm -rf .venv
            fail "$python cannot make a virtual environment: apt-get install ${python}-venv"
        }
    fi
    heading "pip install -e '.[$extra]'"
    .venv/bin/python -m pip install -q --disable-pip-version-check -e ".[$extra]"
    rm -f ".venv/.tandem-$extra-"*
    touch "$stamp"
}

# .venv-tensorflow with what exports TensorFlow models, made again only when its versions changed.
make_tensorflow_venv() {
    local requirements stamp
    read -ra requirements < <(.venv/bin/python -c \
        'from toolkit.importers.tensorflow import REQUIREMENTS; print(*REQUIREMENTS)')
    stamp=".venv-tensorflow/.tandem-$(IFS=+ && echo "${requirements[*]}")"
    if [[ -e $stamp ]]; then
        return
    fi
    heading "pip install ${requirements[*]} in .venv-tensorflow"
    .venv/bin/python -m venv .venv-tensorflow
    .venv-tensorflow/bin/python -m pip install -q --disable-pip-version-check "${requirements[@]}"
    rm -f .venv-tensorflow/.tandem-*
    touch "$stamp"
}
