"""Sends damaged requests to both ports of a server: `python -m scripts.fuzz_serve --seconds 3600`.

A server of its own is started. Requests that stock clients send are the seeds; bytes of them are
changed, cut, doubled and joined. After each hundred a good request must be answered, and at the end
the process must live and hold hardly more memory than after the first quarter. Every refusal over
HTTP must be JSON with an `error`. The seed of a failure is printed.
"""

import argparse
import contextlib
import json
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from pipelines.serving.messages import SERVICE, message
from scripts.bench_serve import INPUT, NAME, OUTPUT, Peer, _ours, started

ROUND = 100
TIMEOUT_S = 60
MAX_LEAK_KB = 5 * 1024
WARM_UP = 0.25  # of the time
METHODS = (
    "ModelInfer", "ModelConfig", "ModelMetadata", "RepositoryIndex", "SystemSharedMemoryRegister",
    "LogSettings", "TraceSetting",
)  # fmt: skip
SPLICES = (
    b"\0", b"\xff" * 9, b"\r\n", b"\r\n\r\n", b"[" * 300, b"-1", b"99999999999999999999", b'"',
    b"chunked", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 3\r\n", b"1e999", b"null",
    b"/v2/models/identity/infer", b"%2e%2e%2f",
)  # fmt: skip


def http_seeds() -> list[bytes]:
    """Return whole requests of HTTP."""
    body = json.dumps({
        "id": "1", "outputs": [{"name": OUTPUT, "parameters": {"classification": 2}}],
        "inputs": [{"name": INPUT, "shape": [4], "datatype": "FP32", "data": [1, 2.5, 3, 4]}],
    }).encode()  # fmt: skip
    one = triton_http.InferInput(INPUT, [4], "FP32")
    one.set_data_from_numpy(np.arange(4, dtype=np.float32))
    binary, length = triton_http.InferenceServerClient.generate_request_body([one])
    head = f"Inference-Header-Content-Length: {length}\r\n".encode()
    path = f"/v2/models/{NAME}/infer"
    region = b'{"key": "/x", "offset": 0, "byte_size": 8}'
    return [
        _post(path, body),
        _post(path, bytes(binary), head),
        _post(path, bytes(16), b"Inference-Header-Content-Length: 0\r\n"),
        f"POST {path} HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: [::1]\r\n\r\n".encode()
        + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
        _post("/v2/systemsharedmemory/region/x/register", region),
        _post("/v2/repository/index", b'{"ready": true}'),
        _post("/v2/logging", b'{"log_verbose_level": 1}'),
        _post("/v2/trace/setting", b'{"trace_level": ["OFF"]}'),
        b"GET /v2/models/identity/config HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]


def _post(path: str, body: bytes, headers: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n".encode()
    return head + headers + b"\r\n" + body


def grpc_seeds() -> list[bytes]:
    """Return messages of gRPC."""
    request = message("ModelInferRequest")(model_name=NAME, id="1")
    one = request.inputs.add(name=INPUT, datatype="FP32", shape=[4])
    one.contents.fp32_contents.extend([1] * 4)
    raw = message("ModelInferRequest")(model_name=NAME, raw_input_contents=[bytes(16)])
    raw.inputs.add(name=INPUT, datatype="FP32", shape=[4])
    region = message("SystemRegion")(name="x", key="/x", byte_size=8)
    return [one.SerializeToString() for one in (request, raw, region)]


def damaged(seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """Return a seed with some damage."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((0, 1, 1, 2, 4, 16))):
        at = chance.randrange(len(data) + 1)
        way = chance.randrange(5)
        if way == 0 and data:
            data[at % len(data)] = chance.randrange(256)
        elif way == 1:
            data[at : at + chance.randrange(1, 9)] = b""
        elif way == 2:
            data[at:at] = chance.choice(SPLICES)
        elif way == 3:
            data[at:at] = data[: chance.randrange(40)]
        else:
            data[at:] = chance.choice(seeds)[chance.randrange(40) :]
    return bytes(data)


def ask_http(port: int, data: bytes) -> None:
    """Send bytes; a refusal must say why. Raises ValueError: it does not."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as one:
        with contextlib.suppress(OSError):
            one.sendall(data)
            one.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := one.recv(65536):
                answer += part
    while answer:
        head, _, answer = answer.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100"):
            continue
        if b"\r\nContent-Length: " not in head:
            raise ValueError(f"an answer without a length: {head[:200]!r}")
        length = int(head.partition(b"\r\nContent-Length: ")[2].split()[0])
        body, answer = answer[:length], answer[length:]
        if head[9:12] >= b"400" and not json.loads(body).get("error"):
            raise ValueError(f"a refusal without a sentence: {head!r} {body[:300]!r}")


def ask_grpc(channel: Any, method: str, data: bytes) -> None:  # noqa: ANN401
    """Call a method; a refusal must say why. Raises ValueError: it does not."""
    try:
        channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        bad = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED}
        if error.code() in bad or not error.details():
            raise ValueError(f"{method}: {error.code()} {error.details()}") from error


def memory_kb(pid: int) -> int:
    """Return the resident memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0])


def fuzz(seconds: float, seed: int, say: Callable[[str], None]) -> int:
    """Return 1 if something failed."""
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-serve-") as name,
        started(Peer("Tandem", _ours), Path(name)) as (pid, http, port),
        triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        begin, number, held_kb = time.monotonic(), 0, 0
        seeds = http_seeds(), grpc_seeds()
        good = triton_grpc.InferInput(INPUT, [4], "FP32")
        good.set_data_from_numpy(np.arange(4, dtype=np.float32))
        while time.monotonic() - begin < seconds or number < 4 * ROUND:
            chance = random.Random(f"{seed}-{number}")
            try:
                ask_http(http, damaged(seeds[0], chance))
                ask_grpc(channel, chance.choice(METHODS), damaged(seeds[1], chance))
                if number % ROUND == 0:
                    client.infer(NAME, [good])
            except (ValueError, OSError, triton_grpc.InferenceServerException) as error:
                say(f"seed {seed}, request {number}: {error}")
                return 1
            number += 1
            # malloc keeps what the largest requests took; a leak goes on after that.
            if number == 2 * ROUND or time.monotonic() - begin < WARM_UP * seconds:
                held_kb = memory_kb(pid)
        end_kb = memory_kb(pid)
        spent_s = time.monotonic() - begin
        say(f"{2 * number} requests in {spent_s:.0f} s, memory {held_kb} kB, then {end_kb} kB")
        return int(end_kb - held_kb > MAX_LEAK_KB)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz a server of its own."""
    parser = argparse.ArgumentParser(description="Send damaged requests to `tandem serve`.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    return fuzz(options.seconds, options.seed, print)


if __name__ == "__main__":
    sys.exit(main())
