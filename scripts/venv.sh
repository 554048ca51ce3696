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

# tested_versions KIND PYTHON: the file with the versions that were tested there; empty for the newest.
tested_versions() {
    local file
    file=$PWD/configs/locks/$1-py$("$2" -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
    if [[ ${TANDEM_VERSIONS:-tested} == newest ]]; then
        return
    fi
    if [[ ! -e $file ]]; then
        echo "No versions were tested on $("$2" --version): the newest are taken." >&2
        return
    fi
    echo "$file"
}

# make_environment FOLDER PYTHON KIND REQUIREMENTS...: a virtual environment with the tested versions
# of KIND, made again only when they or pyproject.toml changed.
make_environment() {
    local folder=$1 python=$2 kind=$3 versions stamp
    shift 3
    versions=$(tested_versions "$kind" "$python")
    stamp=$folder/.tandem-$( (echo "$kind $*" && cat pyproject.toml ${versions:+"$versions"}) |
        sha256sum | cut -c 1-16)
    if [[ -e $stamp ]]; then
        return
    fi
    if [[ -x $folder/bin/python ]] && ! "$folder"/bin/python -c \
        'import sys; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' \
        "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"; then
        rm -rf "$folder"
    fi
    if [[ ! -x $folder/bin/python ]]; then
        heading "$python -m venv $folder"
        "$python" -m venv "$folder" || {
            rm -rf "$folder"
            fail "$python cannot make a virtual environment: apt-get install ${python}-venv"
        }
    fi
    heading "pip install $* in $folder, versions: ${versions:-the newest}"
    # Python compiles what is imported; most of a large package never is.
    local words=(-q --disable-pip-version-check --no-compile)
    if [[ -z $versions ]]; then
        words+=(--upgrade --upgrade-strategy eager)
    fi
    local requirements=() one
    for one in "$@"; do
        if [[ $one == .* ]]; then
            requirements+=(-e)
        fi
        requirements+=("$one")
    done
    # In the environment they hold for what builds packages, too; pip has two names for that.
    env ${versions:+PIP_CONSTRAINT="$versions" PIP_BUILD_CONSTRAINT="$versions"} \
        "$folder"/bin/python -m pip install "${words[@]}" "${requirements[@]}"
    rm -f "$folder"/.tandem-*
    touch "$stamp"
}

# make_venv EXTRA: .venv with tandem-edge[EXTRA]. The tests' is tested as `dev`, all others as `host`.
make_venv() {
    local extra=$1 kind=host python=.venv/bin/python
    if [[ $extra == dev* ]]; then
        kind=dev
    fi
    if [[ ! -x $python ]]; then
        python=$(find_python)
    fi
    make_environment .venv "$python" "$kind" ".[$extra]"
}

# .venv-tensorflow with what exports TensorFlow models.
make_tensorflow_venv() {
    local requirements
    read -ra requirements < <(.venv/bin/python -c \
        'from toolkit.importers.tensorflow import REQUIREMENTS; print(*REQUIREMENTS)')
    make_environment .venv-tensorflow .venv/bin/python tensorflow "${requirements[@]}"
}
