#!/usr/bin/env bash
# Run TUF's conformance suite (github.com/theupdateframework/tuf-conformance) through the board's
# check of metadata, over each transport: http, folder and mqtt, or those that are named.
#   scripts/tuf_conformance.sh SUITE [TRANSPORT...]
# PYTHON names the interpreter (default: .venv/bin/python). Needs faketime, and mosquitto for mqtt.
set -euo pipefail
if (($# == 0)); then
    sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
suite=$(cd "$1" && pwd)
shift
if (($# == 0)); then
    set -- http folder mqtt
fi
python=${PYTHON:-$root/.venv/bin/python}
work=$(mktemp -d)
broker=

# shellcheck disable=SC2317  # the trap calls it
clean_up() {
    if [[ -n $broker ]]; then
        kill "$broker"
        wait "$broker" 2>/dev/null || true
    fi
    rm -rf "$work"
}
trap clean_up EXIT

if [[ ! -d $suite/tuf_conformance ]]; then
    echo "$suite is not the suite: it has no folder tuf_conformance" >&2
    exit 2
fi
if ! command -v faketime >/dev/null; then
    echo "the suite needs faketime: apt-get install faketime" >&2
    exit 2
fi
if [[ " $* " == *" mqtt "* ]]; then
    TANDEM_TUF_BROKER_PORT=$("$python" -c \
        'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    export TANDEM_TUF_BROKER_PORT
    printf 'listener %s 127.0.0.1\nset_tcp_nodelay true\nallow_anonymous true\n' \
        "$TANDEM_TUF_BROKER_PORT" >"$work/mosquitto.conf"
    PATH=$PATH:/usr/sbin mosquitto -c "$work/mosquitto.conf" >"$work/mosquitto.log" 2>&1 &
    broker=$!
fi

status=0
for transport in "$@"; do
    echo "== $transport"
    # faketime must not stand still for the waits of a connection.
    TANDEM_TUF_TRANSPORT=$transport FAKETIME_DONT_FAKE_MONOTONIC=1 DONT_FAKE_MONOTONIC=1 \
        PYTHONPATH=$root PYTHONDONTWRITEBYTECODE=1 \
        "$python" -m pytest -q -p no:cacheprovider --rootdir "$suite" -c /dev/null \
        "$suite/tuf_conformance" --entrypoint "$python $root/scripts/tuf_client.py" || status=1
done
exit "$status"
