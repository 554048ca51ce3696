"""Requests of a sequence run in order with the state of the one before; sequences share batches."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from onnx import TensorProto, helper
from serving_fixtures import served, value, write_onnx
from tritonclient.utils import InferenceServerException

from device.errors import ConfigError
from pipelines.serving import sequences
from pipelines.serving.protocol import InferRequest, Refusal, Status, Tensor, refuse
from pipelines.serving.queued_model import QueuedModel
from pipelines.serving.repository import Repository, scan
from pipelines.serving.sequences import SequenceModel
from pipelines.serving.server import Ports

PORTS = """
input { name: "INPUT" data_type: TYPE_INT32 dims: 1 }
output { name: "OUTPUT" data_type: TYPE_INT32 dims: 1 }
"""
CONTROLS = """
  control_input {
    name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }
  }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } }
"""
STATE = 'state { input_name: "STATE" output_name: "NEXT" data_type: TYPE_INT32 dims: 1 %s }'


def accumulator(root: Path, name: str, sequence: str) -> None:
    """OUTPUT is the sum of a sequence's inputs, and 100 times its id where it starts."""
    nodes = [
        helper.make_node("Cast", ["ID"], ["id"], to=TensorProto.INT32),
        helper.make_node("Mul", ["id", "START"], ["first"]),
        helper.make_node("Constant", [], ["hundred"], value_int=100),
        helper.make_node("Cast", ["hundred"], ["scale"], to=TensorProto.INT32),
        helper.make_node("Mul", ["first", "scale"], ["offset"]),
        helper.make_node("Add", ["INPUT", "offset"], ["given"]),
        helper.make_node("Add", ["given", "STATE"], ["OUTPUT"]),
        helper.make_node("Identity", ["OUTPUT"], ["NEXT"]),
    ]
    shape: list[int | str] = ["batch", 1]
    kinds = {"INPUT": TensorProto.INT32, "START": TensorProto.INT32, "STATE": TensorProto.INT32}
    inputs = [value(one, kind, shape) for one, kind in kinds.items()]
    inputs.append(value("ID", TensorProto.INT64, shape))
    outputs = [value(one, TensorProto.INT32, shape) for one in ("OUTPUT", "NEXT")]
    write_onnx(root / name / "1" / "model.onnx", nodes, inputs, outputs)
    text = f"max_batch_size: 8 {PORTS} sequence_batching {{ {sequence} }}"
    (root / name / "config.pbtxt").write_text(text)


def of_triton(root: Path, kind: str) -> None:
    """The dynamic sequence model of Triton's tests, which keeps no state: OUTPUT is
    (INPUT + START + END * CORRID) * READY."""
    nodes = [
        helper.make_node("Cast", ["CORRID"], ["id"], to=TensorProto.INT32),
        helper.make_node("Mul", ["id", "END"], ["last"]),
        helper.make_node("Add", ["INPUT", "START"], ["given"]),
        helper.make_node("Add", ["given", "last"], ["sum"]),
        helper.make_node("Mul", ["sum", "READY"], ["OUTPUT"]),
    ]
    flags = ("START", "END", "READY")
    inputs = [value(one, TensorProto.INT32, ["batch", 1]) for one in ("INPUT", *flags)]
    inputs.append(value("CORRID", getattr(TensorProto, kind), ["batch", 1]))
    outputs = [value("OUTPUT", TensorProto.INT32, ["batch", 1])]
    folder = root / f"dyna_{kind.lower()}"
    write_onnx(folder / "1" / "model.onnx", nodes, inputs, outputs)
    rows = "".join(
        f'control_input {{ name: "{one}" control {{ kind: CONTROL_SEQUENCE_{one}'
        " int32_false_true: [ 0, 1 ] } }"
        for one in flags
    )
    row = f'name: "CORRID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{kind} }}'
    sequence = f"sequence_batching {{ oldest {{ }} {rows} control_input {{ {row} }} }}"
    (folder / "config.pbtxt").write_text(f"max_batch_size: 8 {PORTS} {sequence}")


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    root = tmp_path_factory.mktemp("sequences")
    hour = "max_sequence_idle_microseconds: 3600000000"
    accumulator(root, "sums", f"{hour} oldest {{ }} {CONTROLS} {STATE % ''}")
    accumulator(root, "forgets", f"max_sequence_idle_microseconds: 1 {CONTROLS} {STATE % ''}")
    initial = 'initial_state { data_type: TYPE_INT32 dims: 1 data_file: "seven" }'
    accumulator(root, "seven", f"{hour} direct {{ }} {CONTROLS} {STATE % initial}")
    (root / "seven" / "initial_state").mkdir()
    (root / "seven" / "initial_state" / "seven").write_bytes(np.int32(7).tobytes())
    of_triton(root, "UINT64")
    of_triton(root, "STRING")
    with served(root) as ports:
        yield ports


def number(library: Any, value: int, rows: int = 1) -> list[Any]:
    one = library.InferInput("INPUT", [rows, 1], "INT32")
    one.set_data_from_numpy(np.full((rows, 1), value, np.int32))
    return [one]


@pytest.mark.parametrize("library", [triton_http, triton_grpc])
def test_sequences_keep_their_sums_apart(ports: Ports, library: Any) -> None:
    port = ports.http if library is triton_http else ports.grpc
    with library.InferenceServerClient(f"127.0.0.1:{port}") as client:

        def ask(model: str, ident: int, value: int, **flags: bool) -> int:
            answer = client.infer(model, number(library, value), sequence_id=ident, **flags)
            return int(answer.as_numpy("OUTPUT")[0, 0])

        assert [one["name"] for one in client.get_model_metadata("sums", **(
            {} if library is triton_http else {"as_json": True}
        ))["inputs"]] == ["INPUT"]  # fmt: skip
        assert ask("sums", 1, 5, sequence_start=True) == 105
        assert ask("sums", 2, 6, sequence_start=True) == 206
        assert ask("sums", 1, 1) == 106
        assert ask("sums", 2, 1, sequence_end=True) == 207
        assert ask("sums", 1, 2, sequence_start=True) == 102  # anew
        assert ask("sums", 1, 2, sequence_end=True) == 104
        for ident in (1, 2):
            with pytest.raises(InferenceServerException, match="must specify the START flag"):
                ask("sums", ident, 1)
        with pytest.raises(InferenceServerException, match="non-zero or non-empty correlation"):
            client.infer("sums", number(library, 1))
        with pytest.raises(InferenceServerException, match="the model takes INT64"):
            client.infer("sums", number(library, 1), sequence_id="a", sequence_start=True)
        with pytest.raises(InferenceServerException, match="batch-size 1"):
            client.infer("sums", number(library, 1, rows=2), sequence_id=1, sequence_start=True)
        assert ask("seven", 1, 1, sequence_start=True) == 108
        assert ask("forgets", 1, 1, sequence_start=True) == 101
        with pytest.raises(InferenceServerException, match="must specify the START flag"):
            ask("forgets", 1, 1)


@pytest.mark.parametrize(("model", "ident"), [("dyna_uint64", 1000), ("dyna_string", "1002")])
@pytest.mark.parametrize("library", [triton_http, triton_grpc])
def test_sequences_without_state_are_told_start_end_and_id(
    ports: Ports, library: Any, model: str, ident: int | str
) -> None:
    port = ports.http if library is triton_http else ports.grpc
    with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
        sums = [
            client.infer(
                model, number(library, 7), sequence_id=ident,
                sequence_start=step == 0, sequence_end=step == 2,
            ).as_numpy("OUTPUT")[0, 0] for step in range(3)
        ]  # fmt: skip
    assert sums == [8, 7, 7 + int(ident)]


def test_a_stream_of_sequences_keeps_their_order(ports: Ports) -> None:
    answers: list[Any] = []
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
        client.start_stream(lambda result, error: answers.append(error or result))
        for step in range(6):
            for ident in (11, 12):
                client.async_stream_infer(
                    "sums", number(triton_grpc, step), request_id=str(ident), sequence_id=ident,
                    sequence_start=step == 0, sequence_end=step == 5,
                )  # fmt: skip
        client.stop_stream()
    for key in ("11", "12"):
        sums = [one.as_numpy("OUTPUT")[0, 0] for one in answers if one.get_response().id == key]
        assert sums == [100 * int(key) + total for total in (0, 1, 3, 6, 10, 15)]


def test_sequences_of_many_clients_share_batches(tmp_path: Path) -> None:
    accumulator(tmp_path, "sums", f"oldest {{ preferred_batch_size: 8 }} {CONTROLS} {STATE % ''}")

    async def run() -> QueuedModel:
        models = Repository(partial(scan, tmp_path), "none")
        await models.load_all()
        model = models.find("sums")
        assert isinstance(model, QueuedModel)
        await model.infer(model.sample())
        data = np.ones((1, 1), np.int32)

        async def one(ident: int) -> None:
            parameters = {"sequence_id": ident, "sequence_start": True}
            inputs = [Tensor("INPUT", "INT32", (1, 1), data)]
            request = InferRequest("sums", "", inputs, parameters=parameters)
            (output,) = await model.infer(request)
            assert output.data[0, 0] == 100 * ident + 1

        await asyncio.gather(*(one(ident) for ident in range(1, 9)))
        await models.close()
        return model

    figures = asyncio.run(run()).figures
    assert figures.inferences == 9
    assert figures.executions < 9


def in_sequence(ident: int, value: int = 1, **flags: bool) -> InferRequest:
    data = np.full((1, 1), value, np.int32)
    parameters = {"sequence_id": ident, **{f"sequence_{name}": flags[name] for name in flags}}
    return InferRequest("sums", "", [Tensor("INPUT", "INT32", (1, 1), data)], parameters=parameters)


def with_sums(root: Path, check: Callable[[SequenceModel], Awaitable[None]], idle: str) -> None:
    """Run `check` on a model that is loaded."""
    accumulator(root, "sums", f"max_sequence_idle_microseconds: {idle} {CONTROLS} {STATE % ''}")

    async def run() -> None:
        models = Repository(partial(scan, root), "none")
        await models.load_all()
        model = models.find("sums")
        assert isinstance(model, SequenceModel)
        await check(model)
        await models.close()

    asyncio.run(run())


HOUR = "3600000000"


async def answer_of(model: SequenceModel, request: InferRequest) -> int:
    (output,) = await model.infer(request)
    return int(output.data[0, 0])


def test_an_end_that_is_refused_may_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(model: SequenceModel) -> None:
        assert await answer_of(model, in_sequence(1, start=True)) == 101

        def full(*_: object) -> None:
            refuse("the queue is full", Status.UNAVAILABLE)

        with monkeypatch.context() as patch:
            patch.setattr(model.scheduler, "_put", full)
            with pytest.raises(Refusal, match="is full"):
                await model.infer(in_sequence(1, end=True))
        ends, late = await asyncio.gather(
            answer_of(model, in_sequence(1, end=True)), answer_of(model, in_sequence(1)),
            return_exceptions=True,
        )  # fmt: skip
        assert ends == 102
        assert isinstance(late, Refusal)
        assert "must specify the START flag" in str(late)

    with_sums(tmp_path, check, HOUR)


def test_states_are_rows_of_their_own_and_their_bytes_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "MAX_STATE_BYTES", 8)  # of two sequences

    async def check(model: SequenceModel) -> None:
        for ident in (1, 2):
            assert await answer_of(model, in_sequence(ident, start=True)) == 100 * ident + 1
        states = [array for one in model._sequences.values() for array in one.states.values()]
        assert [array.base for array in states] == [None, None]
        with pytest.raises(Refusal, match="would have 12 bytes, and may have 8"):
            await model.infer(in_sequence(3, start=True))
        assert await answer_of(model, in_sequence(1, end=True)) == 102
        assert await answer_of(model, in_sequence(3, start=True)) == 301

    with_sums(tmp_path, check, HOUR)


def test_the_states_of_all_models_have_one_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "MAX_STATE_BYTES", 8)
    for name, idle in (("sums", HOUR), ("others", "1")):
        text = f"max_sequence_idle_microseconds: {idle} {CONTROLS} {STATE % ''}"
        accumulator(tmp_path, name, text)

    async def run() -> None:
        models = Repository(partial(scan, tmp_path), "explicit")
        await models.load_all(("*",))
        sums, others = models.find("sums"), models.find("others")
        assert isinstance(sums, SequenceModel)
        assert isinstance(others, SequenceModel)
        await answer_of(sums, in_sequence(1, start=True))
        await answer_of(others, in_sequence(1, start=True))
        await answer_of(sums, in_sequence(2, start=True))  # the idle one of the other goes
        assert others._sequences == {}
        with pytest.raises(Refusal, match="of this server would have 12 bytes, and may have 8"):
            await others.infer(in_sequence(1, start=True))
        await models.unload("sums")
        await answer_of(others, in_sequence(1, start=True))
        assert others._budget.bytes == 4
        await models.close()

    asyncio.run(run())


def test_idle_sequences_are_forgotten_without_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "EXPIRE_S", (0.01, 0.01))

    async def check(model: SequenceModel) -> None:
        await model.infer(in_sequence(1, start=True))
        assert model._sequences
        end_s = time.monotonic() + 30
        while model._sequences:
            assert time.monotonic() < end_s
            await asyncio.sleep(0.01)
        assert model._budget.bytes == 0

    with_sums(tmp_path, check, "200000")


@pytest.mark.parametrize(
    ("sequence", "more", "sentence"),
    [
        ("iterative_sequence: true", "", "iterative_sequence"),
        (CONTROLS.replace("INT64", "INT32"), "", "control 'ID' .* is INT32 .* INT64 inside"),
        (CONTROLS.replace("TYPE_INT64", "TYPE_FP32"), "", "control 'ID' .* is of no type"),
        (CONTROLS + STATE.replace("NEXT", "none") % "", "", "state 'none' .* not there inside"),
        (CONTROLS + STATE.replace("dims: 1", "dims: -1") % "", "", "has no size that is known"),
        (CONTROLS, "model_transaction_policy { decoupled: true }", "decoupled"),
    ],
)
def test_what_no_sequence_can_be_is_refused_at_load(
    tmp_path: Path, sequence: str, more: str, sentence: str
) -> None:
    accumulator(tmp_path, "sums", sequence)
    path = tmp_path / "sums" / "config.pbtxt"
    path.write_text(path.read_text() + more)

    async def run() -> None:
        models = Repository(partial(scan, tmp_path), "explicit")
        with pytest.raises(ConfigError, match=sentence):
            await models._load(scan(tmp_path)["sums"])

    asyncio.run(run())
