#!/usr/bin/env bash
# Run the selftest of a board kit on a board that has nothing of Tandem yet:
#   bash kit/board_kit.sh --out report.tandem-report
# It makes an environment in the kit's folder that sees JetPack's packages, installs the kit's wheels
# (or what pip finds, without any) and runs `tandem-agent selftest`. Other options go there, too.
set -euo pipefail

kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${TANDEM_BOARD_ROOT:-}  # tests give the files of another board

fail() {
    printf 'board_kit.sh: %s\n' "$1" >&2
    exit 1
}

release=""
if [[ -r $root/etc/nv_tegra_release ]]; then
    release=$(sed -n 's/^# R\([0-9]*\) .*/\1/p' "$root/etc/nv_tegra_release")
fi
python=${TANDEM_PYTHON:-python3}
command -v "$python" >/dev/null || fail "there is no $python: sudo apt-get install python3 python3-venv"
if [[ -n $release ]] && ((release < 36)); then
    fail "this board has L4T R$release (JetPack 5 or older, Python 3.8), which runs no agent.
Plan and export for it on the host instead: tandem plan --jetpack 5.1.6, then tandem export --to trtexec;
or flash JetPack 6 (Orin modules only)."
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$python" --version) is too old: Tandem needs 3.10 or newer. JetPack 6 brings 3.10."
[[ -r $kit/kit.json ]] || fail "$kit holds no kit.json: copy the whole folder of the kit"

venv=$kit/.venv
if [[ ! -x $venv/bin/python ]]; then
    "$python" -m venv --system-site-packages "$venv" ||
        fail "no environment could be made: sudo apt-get install python3-venv"
fi
# The board's cv2 says which NumPy it loads beside; pip would bring NumPy 2 beside JetPack's.
constraints=$kit/constraints.txt
"$venv/bin/python" "$kit/numpy_bound.py" >"$constraints" ||
    fail "$kit/numpy_bound.py does not run: copy the whole folder of the kit again"
shopt -s nullglob
wheels=("$kit"/wheels/*.whl)
if ((${#wheels[@]})); then
    # What the wheels lack is looked for beside them first, and then where pip looks.
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$constraints" \
        --find-links "$kit/wheels" "${wheels[@]}" || fail "pip could not install $kit/wheels: add the wheels that it names there"
elif ! "$venv/bin/python" -c 'import tandem; tandem.open_session' 2>/dev/null; then
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$constraints" \
        tandem-edge ||
        fail "pip could not install tandem-edge: put its wheel into $kit/wheels"
fi
exec "$venv/bin/python" -c 'import sys, tandem; sys.exit(tandem.agent())' selftest --kit "$kit" "$@"
