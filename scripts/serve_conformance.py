"""Checks any server of the Open Inference Protocol (KServe v2):

    python -m scripts.serve_conformance http://127.0.0.1:8000 --model simple

Every check is a row of CHECKS and asks over HTTP with the standard library alone. The model's
inputs are read from its metadata, and it is given zeros (BYTES: "0"). `--extensions` checks those
of Triton, too: binary tensors, statistics, the model's configuration and the repository's index.
Exit status 1: a check failed. Sources: github.com/kserve/open-inference-protocol, and docs/protocol
of github.com/triton-inference-server/server.
"""

import argparse
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SIZES = {
    "BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "FP16": 2, "BF16": 2, "UINT32": 4,
    "INT32": 4, "FP32": 4, "UINT64": 8, "INT64": 8, "FP64": 8,
}  # fmt: skip
NAMELESS = "no-such-model-here"


class Failed(Exception):  # noqa: N818
    """A check failed; the message says what the server answered."""


@dataclass(frozen=True)
class Answer:
    """Status, headers with names in lower case, and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:  # noqa: ANN401
        """Return the body's JSON."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise Failed(f"the body is no JSON: {self.body[:100]!r}") from error


@dataclass(frozen=True)
class Server:
    """A server by URL, and one of its models."""

    url: str
    model: str

    def ask(self, path: str, data: bytes | None = None, **headers: str) -> Answer:
        """GET, or POST if there is data."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        if data is not None:
            names.setdefault("Content-Type", "application/json")
        request = urllib.request.Request(self.url + path, data, names)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                rows = {name.lower(): value for name, value in answer.headers.items()}
                return Answer(answer.status, rows, answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, {}, error.read())

    @property
    def path(self) -> str:
        """The model's path."""
        return f"/v2/models/{urllib.parse.quote(self.model)}"

    def metadata(self) -> Any:  # noqa: ANN401
        """Return the model's metadata."""
        return _expect(self.ask(self.path), 200).json()

    def inputs(self) -> list[dict[str, Any]]:
        """Return the inputs of a request of zeros."""
        rows = []
        for one in self.metadata()["inputs"]:
            shape = [max(1, int(size)) for size in one["shape"]]
            count = 1
            for size in shape:
                count *= size
            zero: object = "0" if one["datatype"] == "BYTES" else 0
            if one["datatype"] == "BOOL":
                zero = False
            rows.append({**one, "shape": shape, "data": [zero] * count})
        return rows

    def infer(self, *, status: int = 200, **body: object) -> Answer:
        """POST an inference and expect a status."""
        data = json.dumps({"inputs": self.inputs(), **body}).encode()
        return _expect(self.ask(f"{self.path}/infer", data), status)


def _expect(answer: Answer, status: int) -> Answer:
    if answer.status != status:
        raise Failed(f"status {answer.status} and not {status}: {answer.body[:200]!r}")
    return answer


def _hold(condition: bool, what: str) -> None:
    if not condition:
        raise Failed(what)


def _refused(answer: Answer, *statuses: int) -> None:
    if answer.status not in statuses:
        raise Failed(f"status {answer.status} and not {statuses}: {answer.body[:200]!r}")
    _hold(bool(answer.json().get("error")), f"no `error` in {answer.body[:100]!r}")


def live(server: Server) -> None:
    """GET /v2/health/live is 200 and says so."""
    row = _expect(server.ask("/v2/health/live"), 200).json()
    _hold(row.get("live") is True, f"it answers {row}")


def ready(server: Server) -> None:
    """GET /v2/health/ready is 200 and says so."""
    row = _expect(server.ask("/v2/health/ready"), 200).json()
    _hold(row.get("ready") is True, f"it answers {row}")


def server_metadata(server: Server) -> None:
    """GET /v2 names the server, its version and extensions."""
    row = _expect(server.ask("/v2"), 200).json()
    _hold({"name", "version", "extensions"} <= set(row), f"it has {sorted(row)}")
    _hold(isinstance(row["extensions"], list), "extensions is no list")


def model_ready(server: Server) -> None:
    """GET .../ready of the model is 200."""
    _expect(server.ask(f"{server.path}/ready"), 200)


def model_metadata(server: Server) -> None:
    """The model's metadata have a name, a platform, and tensors with name, datatype and shape."""
    row = server.metadata()
    _hold(row.get("name") == server.model, f"its name is {row.get('name')!r}")
    _hold("platform" in row, "it has no platform")
    for one in (*row["inputs"], *row["outputs"]):
        _hold({"name", "datatype", "shape"} <= set(one), f"a tensor has {sorted(one)}")
        _hold(one["datatype"] in {*SIZES, "BYTES"}, f"a datatype is {one['datatype']!r}")


def infer_json(server: Server) -> None:
    """An inference in JSON answers every output, with data of its shape, and the id."""
    row = server.infer(id="conformance-1").json()
    _hold(row.get("id") == "conformance-1", f"the id is {row.get('id')!r}")
    _hold(row.get("model_name") == server.model, f"model_name is {row.get('model_name')!r}")
    names = {one["name"] for one in server.metadata()["outputs"]}
    _hold({one["name"] for one in row["outputs"]} == names, f"the outputs are {row['outputs']}")
    for one in row["outputs"]:
        count = 1
        for size in one["shape"]:
            count *= size
        _hold(len(_flat(one["data"])) == count, f"{one['name']!r} has another size than its shape")


def _flat(data: list[Any]) -> list[Any]:
    while data and isinstance(data[0], list):
        data = [value for row in data for value in row]
    return data


def nested_data(server: Server) -> None:
    """Nested data are the same as flat ones."""
    rows = server.inputs()
    for one in rows:
        for size in reversed(one["shape"][1:]):
            one["data"] = [one["data"][i : i + size] for i in range(0, len(one["data"]), size)]
    server.infer(inputs=rows)


def one_output(server: Server) -> None:
    """`outputs` chooses what is answered."""
    name = server.metadata()["outputs"][-1]["name"]
    row = server.infer(outputs=[{"name": name}]).json()
    _hold([one["name"] for one in row["outputs"]] == [name], f"it answered {row['outputs']}")


def unknown_model(server: Server) -> None:
    """An unknown model is refused with an error."""
    _refused(server.ask(f"/v2/models/{NAMELESS}"), 400, 404)
    _refused(server.ask(f"/v2/models/{NAMELESS}/infer", b'{"inputs": []}'), 400, 404)


def damaged_json(server: Server) -> None:
    """A body that is no JSON is refused with an error."""
    for body in (b"{", b"[1]", b"", b"[" * 3000):
        _refused(server.ask(f"{server.path}/infer", body), 400, 422)


def _changed(change: Callable[[dict[str, Any]], None]) -> Callable[[Server], None]:
    def check(server: Server) -> None:
        rows = server.inputs()
        change(rows[0])
        body = json.dumps({"inputs": rows}).encode()
        _refused(server.ask(f"{server.path}/infer", body), 400, 422)

    return check


def missing_input(server: Server) -> None:
    """A request without an input is refused."""
    body = json.dumps({"inputs": server.inputs()[1:]}).encode()
    _refused(server.ask(f"{server.path}/infer", body), 400, 422)


def unknown_output(server: Server) -> None:
    """An output that the model has not is refused."""
    body = json.dumps({"inputs": server.inputs(), "outputs": [{"name": NAMELESS}]}).encode()
    _refused(server.ask(f"{server.path}/infer", body), 400, 404, 422)


def lives_after_refusals(server: Server) -> None:
    """After all of these the model still answers."""
    server.infer()


def binary(server: Server) -> None:
    """Binary tensors by Inference-Header-Content-Length are those of JSON."""
    rows, content = server.inputs(), b""
    for one in rows:
        data = one.pop("data")
        size = SIZES.get(one["datatype"])
        part = b"\1\0\0\0000" * len(data) if size is None else bytes(size * len(data))
        one["parameters"] = {"binary_data_size": len(part)}
        content += part
    head = json.dumps({"inputs": rows, "parameters": {"binary_data_output": True}}).encode()
    answer = server.ask(
        f"{server.path}/infer",
        head + content,
        Inference_Header_Content_Length=str(len(head)),
        Content_Type="application/octet-stream",
    )
    length = _expect(answer, 200).headers.get("inference-header-content-length")
    _hold(length is not None, "the answer has no Inference-Header-Content-Length")
    outputs = json.loads(answer.body[: int(length or 0)])["outputs"]
    sizes = sum(one["parameters"]["binary_data_size"] for one in outputs)
    _hold(int(length or 0) + sizes == len(answer.body), "the sizes do not add up to the body")


def header_out_of_range(server: Server) -> None:
    """An Inference-Header-Content-Length beyond the body, or no number, is refused."""
    body = json.dumps({"inputs": server.inputs()}).encode()
    for length in (str(len(body) + 1), "-1", "x"):
        answer = server.ask(f"{server.path}/infer", body, Inference_Header_Content_Length=length)
        _refused(answer, 400)


def statistics(server: Server) -> None:
    """The statistics count an inference."""

    def count() -> int:
        row = _expect(server.ask(f"{server.path}/stats"), 200).json()["model_stats"][0]
        return int(row["inference_stats"]["success"]["count"])

    before = count()
    server.infer()
    _hold(count() > before, "the count of successes did not rise")


def config(server: Server) -> None:
    """The configuration names the model and its largest batch."""
    row = _expect(server.ask(f"{server.path}/config"), 200).json()
    _hold({"name", "max_batch_size", "input", "output"} <= set(row), f"it has {sorted(row)}")


def index(server: Server) -> None:
    """The index of the repository has the model, and says that it is ready."""
    rows = _expect(server.ask("/v2/repository/index", b"{}"), 200).json()
    states = {one["name"]: one.get("state") for one in rows}
    _hold(states.get(server.model) == "READY", f"the states are {states}")


Check = tuple[str, Callable[[Server], None]]
CHECKS: tuple[Check, ...] = (
    ("live", live),
    ("ready", ready),
    ("server metadata", server_metadata),
    ("model ready", model_ready),
    ("model metadata", model_metadata),
    ("infer with JSON", infer_json),
    ("nested data", nested_data),
    ("one output", one_output),
    ("unknown model", unknown_model),
    ("damaged JSON", damaged_json),
    ("missing input", missing_input),
    ("unknown input", _changed(lambda one: one.update(name=NAMELESS))),
    ("wrong datatype", _changed(lambda one: one.update(datatype="FP99"))),
    ("too many elements", _changed(lambda one: one.update(data=one["data"] * 2))),
    ("negative dimension", _changed(lambda one: one.update(shape=[-1, *one["shape"][1:]]))),
    ("wrong rank", _changed(lambda one: one.update(shape=[1, 1, *one["shape"]]))),
    ("unknown output", unknown_output),
    ("answers after refusals", lives_after_refusals),
)
EXTENSIONS: tuple[Check, ...] = (
    ("binary tensors", binary),
    ("header length out of range", header_out_of_range),
    ("statistics", statistics),
    ("model configuration", config),
    ("repository index", index),
)


def run(server: Server, checks: Sequence[Check]) -> list[tuple[str, str]]:
    """Return each check with why it failed, empty if it did not."""
    rows = []
    for name, check in checks:
        try:
            check(server)
            rows.append((name, ""))
        except Failed as failed:
            rows.append((name, str(failed)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            rows.append((name, f"{type(error).__name__}: {error}"))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the checks; return 1 if one failed."""
    parser = argparse.ArgumentParser(description="Check a server of KServe v2.")
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--extensions", action="store_true")
    options = parser.parse_args(arguments)
    checks = CHECKS + (EXTENSIONS if options.extensions else ())
    rows = run(Server(options.url.rstrip("/"), options.model), checks)
    for name, reason in rows:
        print(f"{'FAIL' if reason else 'ok  '} {name}{': ' + reason if reason else ''}")
    failed = sum(bool(reason) for _, reason in rows)
    print(f"{len(rows) - failed} of {len(rows)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
