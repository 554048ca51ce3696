"""Sessions over real networks, compared with onnxruntime and ONNX's reference on the whole."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from engine_fixtures import (
    PROFILE,
    Network,
    Piece,
    engine_parts,
    node,
    picture,
    single_network,
    split_network,
    whole_model,
    write_network,
)
from msgspec.structs import replace as changed
from onnx.reference import ReferenceEvaluator

from device.engine.file import open_engine, write_engine
from device.engine.manifest import DimRange, MemoryPlan, TensorInfo
from device.errors import SessionError
from device.install_advice import pip_install
from device.runtime import arrays
from device.runtime.exact_products import exact_session
from device.runtime.executors import portable, table
from device.runtime.executors.protocol import Executor, ExecutorKind, SegmentContext
from device.runtime.executors.table import SegmentReport
from device.runtime.session import Session, open_session


def opened(path: Path, network: Network) -> Session:
    return open_session(write_network(path / "e", network), threads=1)


def whole_run(network: Network, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The uncut model in plain onnxruntime, with exact INT8 products."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    runner = exact_session(whole_model(network).SerializeToString(), options)
    return dict(zip(network.outputs, runner.run(list(network.outputs), feeds), strict=True))


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[Session]:
    with opened(tmp_path, split_network("batch")) as session:
        yield session


NETWORKS = [single_network(), split_network(), single_network("batch"), split_network("batch")]


@pytest.mark.parametrize("network", NETWORKS, ids=["single", "split", "single-n", "split-n"])
def test_results_are_those_of_the_whole_model(tmp_path: Path, network: Network) -> None:
    reference = ReferenceEvaluator(whole_model(network))
    with opened(tmp_path, network) as session:
        for seed in range(3):
            feeds = {"x": picture(1 + seed if network.dims else 1, seed)}
            actual = session.infer(feeds)["y"]
            assert actual.tobytes() == whole_run(network, feeds)["y"].tobytes()
            (expected,) = reference.run(None, feeds)
            # The reference sums in another order; nothing here is larger than a few units.
            np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def test_the_networks_tell_their_inputs_apart(cut: Session) -> None:
    results = [cut.infer({"x": picture(1, seed)})["y"] for seed in range(3)]
    assert np.abs(results[0] - results[1]).max() > 1e-3
    assert np.abs(results[1] - results[2]).max() > 1e-3


def test_a_session_says_what_it_takes_and_gives(cut: Session) -> None:
    assert [(one.name, one.dtype, one.shape) for one in cut.inputs] == [
        ("x", "float32", ("batch", 3, 16, 16))
    ]
    assert [(one.name, one.shape) for one in cut.outputs] == [("y", ("batch", 10))]
    assert [(dim.name, dim.min, dim.max) for dim in cut.dims] == [("batch", 1, 4)]


def test_every_size_in_the_range_gives_each_row_its_own_result(cut: Session) -> None:
    batch = picture(4)
    rows = [cut.infer({"x": batch[n : n + 1]})["y"] for n in range(4)]
    for size in (4, 2, 3, 1):
        actual = cut.infer({"x": batch[:size]})["y"]
        assert actual.shape == (size, 10)
        np.testing.assert_allclose(actual, np.concatenate(rows[:size]), rtol=1e-5, atol=1e-6)


def test_outputs_are_the_callers_to_keep(cut: Session) -> None:
    first = cut.infer({"x": picture(2, 1)})["y"]
    result = first.copy()
    second = cut.infer({"x": picture(2, 2)})["y"]
    assert not np.shares_memory(first, second)
    assert not np.shares_memory(first, cut._arena)
    np.testing.assert_array_equal(first, result)
    assert first.flags.writeable
    cut.close()
    np.testing.assert_array_equal(first, result)


def test_what_passes_between_segments_lies_in_the_arena(cut: Session) -> None:
    x = picture(4)
    buffers = cut._buffers
    assert buffers["q1"].offset == buffers["p3"].offset  # q1 is dead when p3 is made
    cut._arena[:] = 0xA5
    cut.infer({"x": x})
    base, first, *_ = split_network("batch").pieces
    middle = replace(split_network("batch"), pieces=(base, first), outputs=("r2",), inputs=("x",))
    expected = whole_run(middle, {"x": x})["r2"]
    result = np.ndarray(expected.shape, expected.dtype, cut._arena, buffers["r2"].offset)
    np.testing.assert_array_equal(result, expected)
    pooled = np.ndarray((4, 16), np.float32, cut._arena, buffers["p3"].offset)
    np.testing.assert_allclose(pooled, expected.mean((2, 3)), rtol=1e-5)


def test_no_result_depends_on_what_an_earlier_run_left(cut: Session) -> None:
    x = picture(3)
    expected = cut.infer({"x": x})["y"]
    for poison in (0x00, 0x7F, 0xFF):
        cut._arena[:] = poison
        assert cut.infer({"x": x})["y"].tobytes() == expected.tobytes()


def test_a_smaller_batch_leaves_the_rest_of_the_arena_alone(cut: Session) -> None:
    cut._arena[:] = 0xA5
    cut.infer({"x": picture(1)})
    r2 = cut._buffers["r2"]
    row = r2.bytes // 4
    assert (cut._arena[r2.offset + row : r2.offset + r2.bytes] == 0xA5).all()


def test_the_bytes_of_a_run_do_not_depend_on_the_threads(tmp_path: Path) -> None:
    path = write_network(tmp_path / "e", split_network("batch"))
    results = []
    for threads in (1, 2, None):
        with open_session(path, threads=threads) as session:
            results.append(session.infer({"x": picture(4)})["y"].tobytes())
    assert results[0] == results[1] == results[2]


def test_callers_on_several_threads_each_get_their_own_result(cut: Session) -> None:
    feeds = [picture(1, seed) for seed in range(4)]
    expected = [cut.infer({"x": x})["y"] for x in feeds]
    wrong: list[int] = []

    def call(which: int) -> None:
        for _ in range(50):
            if cut.infer({"x": feeds[which]})["y"].tobytes() != expected[which].tobytes():
                wrong.append(which)

    callers = [threading.Thread(target=call, args=(which,)) for which in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@pytest.mark.parametrize("layout", ["strided", "column major", "read only", "unaligned"])
def test_feeds_may_lie_in_memory_as_they_like(cut: Session, layout: str) -> None:
    x = picture(2)
    wide = np.zeros((2, 3, 16, 32), np.float32)
    wide[..., ::2] = x
    locked = x.copy()
    locked.flags.writeable = False
    shifted = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)
    layouts = {
        "strided": wide[..., ::2],
        "column major": np.asfortranarray(x),
        "read only": locked,
        "unaligned": shifted,
    }
    expected = cut.infer({"x": x})["y"]
    assert cut.infer({"x": layouts[layout]})["y"].tobytes() == expected.tobytes()
    np.testing.assert_array_equal(layouts[layout], x)


WRONG_FEEDS = [
    ({}, "the input lacks 'x'; give 'x'"),
    ({"x": picture(), "z": picture()}, "the input does not take 'z'; give 'x'"),
    ({"y": picture()}, "the input lacks 'x' and does not take 'y'; give 'x'"),
    ({"x": picture().astype(np.float64)}, "'x' has dtype float64, the engine takes float32"),
    ({"x": picture().astype(">f4")}, "input 'x' has dtype >f4, the engine takes float32"),
    ({"x": picture()[0]}, "has 3 dimensions (3, 16, 16), the engine takes 4 (batch, 3, 16, 16)"),
    ({"x": picture()[:, :2]}, "input 'x' has the size 2 in dimension 1, the engine takes 3"),
    ({"x": picture(5)}, "the size 5 in dimension 0 ('batch'), the engine takes 1 to 4"),
    ({"x": picture(1)[:0]}, "the size 0 in dimension 0 ('batch'), the engine takes 1 to 4"),
    ({"x": [1.0]}, "input 'x' is a list; give a numpy array of float32"),
]


@pytest.mark.parametrize(("feeds", "message"), WRONG_FEEDS)
def test_feeds_that_do_not_fit_are_named(
    cut: Session, feeds: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(SessionError) as caught:
        cut.infer(feeds)
    assert message in str(caught.value)
    assert cut.infer({"x": picture()})["y"].shape == (1, 10)  # nothing was spoilt


def two_inputs() -> Network:
    """int8 and float inputs that share a dynamic dimension; the output's size is not known."""
    nodes = (
        node("DequantizeLinear", ("a", "s", "z"), "af"),
        node("Add", ("af", "b"), "sum"),
        node("NonZero", ("sum",), "places"),
    )
    tail = (node("Cast", ("places",), "y", to=1),)
    tensors = (
        TensorInfo(name="a", dtype="int8", shape=("n", 4), scale=0.5),
        TensorInfo(name="b", dtype="float32", shape=("n", 4)),
        TensorInfo(name="places", dtype="int64", shape=(2, None)),
        TensorInfo(name="y", dtype="float32", shape=(2, None)),
    )
    return Network(
        pieces=(
            Piece("gpu.0", "gpu", nodes, ("a", "b"), ("places",)),
            Piece("dla0.0", "dla0", tail, ("places",), ("y",)),
        ),
        weights={"s": np.array(0.5, np.float32), "z": np.array(0, np.int8)},
        tensors=tensors,
        dims=(DimRange(name="n", min=1, opt=2, max=4),),
        inputs=("a", "b"),
        outputs=("y",),
    )


def test_tensors_of_unknown_size_pass_through(tmp_path: Path) -> None:
    network = two_inputs()
    a = np.array([[2, 0, 4, 0], [0, 0, 0, 6]], np.int8)
    with opened(tmp_path, network) as session:
        for b in (np.zeros((2, 4), np.float32), np.ones((2, 4), np.float32)):
            actual = session.infer({"a": a, "b": b})["y"]
            np.testing.assert_array_equal(actual, np.nonzero(a * 0.5 + b))
            assert actual.dtype == np.float32
        result = session.infer({"a": a, "b": np.ones((2, 4), np.float32)})["y"]
        session.infer({"a": a * 0, "b": np.ones((2, 4), np.float32)})
        np.testing.assert_array_equal(result, np.nonzero(np.ones((2, 4))))


def test_outputs_of_unknown_size_are_left_out_of_a_session_s_arrays(tmp_path: Path) -> None:
    with opened(tmp_path, two_inputs()) as session:
        feeds, outputs = session.arrays({"n": 3})
        assert {name: array.shape for name, array in feeds.items()} == {"a": (3, 4), "b": (3, 4)}
        assert outputs == {}
        for array in feeds.values():
            array[...] = 1
        assert session.infer(feeds, outputs)["y"].shape == (2, 12)
        with pytest.raises(SessionError, match="failed in onnxruntime"):
            session.infer(feeds, {"y": np.empty((2, 5), np.float32)})
        right = np.full((2, 12), np.nan, np.float32)
        np.testing.assert_array_equal(
            session.infer(feeds, {"y": right})["y"], np.nonzero(feeds["b"])
        )


def test_a_size_between_the_steps_of_a_dimension_is_refused(tmp_path: Path) -> None:
    network = two_inputs()
    stepped = replace(network, dims=(DimRange(name="n", min=2, opt=2, max=4, step=2),))
    with opened(tmp_path, stepped) as session:
        a, b = np.zeros((3, 4), np.int8), np.zeros((3, 4), np.float32)
        message = (
            r"'a' has the size 3 in dimension 0 \('n'\), the engine takes multiples of 2; pad or"
        )
        with pytest.raises(SessionError, match=message):
            session.infer({"a": a, "b": b})
        session.infer({"a": np.zeros((4, 4), np.int8), "b": np.zeros((4, 4), np.float32)})


def test_inputs_that_disagree_on_a_dimension_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path, two_inputs()) as session:
        a, b = np.zeros((2, 4), np.int8), np.zeros((3, 4), np.float32)
        message = r"input 'b' has the size 3 in dimension 0 \('n'\), another input has 2 there"
        with pytest.raises(SessionError, match=message):
            session.infer({"a": a, "b": b})
        hint = r"input 'a' has dtype float32, the engine takes int8; .* \(stored = real / 0.5\)"
        with pytest.raises(SessionError, match=hint):
            session.infer({"a": a.astype(np.float32), "b": b})


def test_another_profile_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = write_network(tmp_path / "e", single_network())
    message = (
        f"is for {PROFILE}, this device is agx-orin-64gb; `tandem build --profile agx-orin-64gb`"
    )
    with pytest.raises(SessionError, match=message):
        open_session(path, profile="agx-orin-64gb")
    with open_session(path, profile=PROFILE) as session:
        assert session.infer({"x": picture()})["y"].shape == (1, 10)


def test_no_threads_are_refused(tmp_path: Path) -> None:
    path = write_network(tmp_path / "e", single_network())
    with pytest.raises(SessionError, match="was given 0 threads; give at least 1"):
        open_session(path, threads=0)


def test_a_report_says_what_runs_and_why_nothing_better(cut: Session) -> None:
    version = onnxruntime.__version__
    why = "the engine carries no tensorrt or cuda implementation of it"
    assert [(one.segment, one.processor) for one in cut.reports] == [
        ("gpu.0", "gpu"),
        ("dla0.0", "dla0"),
        ("gpu.1", "gpu"),
        ("dla0.1", "dla0"),
    ]
    assert cut.reports[1] == SegmentReport(
        "dla0.0",
        "dla0",
        "portable",
        f"portable (onnxruntime {version}, CPU): {why}",
        runs_on=("cpu",),
    )


def test_an_executor_that_does_not_work_here_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = ExecutorKind("portable", "portable", portable.load, lambda: "it is away today")
    monkeypatch.setattr(table, "EXECUTORS", (away,))
    message = "segment 'gpu.0' cannot be run here: portable: it is away today"
    with pytest.raises(SessionError, match=message):
        open_session(write_network(tmp_path / "e", single_network()))


class Recorder(Executor):
    """An executor that cannot run and notes when it is closed."""

    description = "a recorder"

    def __init__(self, closed: list[str], name: str) -> None:
        self._closed, self._name = closed, name

    def run(
        self,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray | None],
        sizes: Mapping[str, int],
    ) -> dict[str, np.ndarray]:
        raise SessionError("it cannot run")

    def close(self) -> None:
        self._closed.append(self._name)


def recorded(monkeypatch: pytest.MonkeyPatch, broken: str = "") -> list[str]:
    """The names of closed segments; loading the segment `broken` fails."""
    closed: list[str] = []

    def load(context: SegmentContext, _: object) -> Executor:
        if context.segment.name == broken:
            raise SessionError(f"{context.where} is broken")
        return Recorder(closed, context.segment.name)

    monkeypatch.setattr(table, "EXECUTORS", (ExecutorKind("recorder", "portable", load),))
    return closed


def test_a_session_closes_its_executors_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = recorded(monkeypatch)
    session = open_session(write_network(tmp_path / "e", split_network()))
    names = [report.segment for report in session.reports]
    session.close()
    session.close()
    assert closed == names[::-1]
    assert session.executors == ()


def test_segments_loaded_before_one_that_fails_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = recorded(monkeypatch, broken="gpu.1")
    with pytest.raises(SessionError, match=r"segment 'gpu\.1' is broken"):
        open_session(write_network(tmp_path / "e", split_network()))
    assert closed == ["dla0.0", "gpu.0"]


def test_a_kind_that_is_requested_is_taken_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> str:
        return "it is away today"

    kind = ExecutorKind("special", "portable", portable.load, absent, requested=lambda _: True)
    monkeypatch.setattr(table, "EXECUTORS", (kind, *table.EXECUTORS))
    with pytest.raises(SessionError, match=r"cannot be run here: special: it is away today$"):
        open_session(write_network(tmp_path / "e", single_network()))


def test_without_onnxruntime_the_sentence_says_what_to_install(tmp_path: Path) -> None:
    path = write_network(tmp_path / "e", single_network())
    code = """
import sys
from importlib.machinery import PathFinder
class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "onnxruntime" else super().find_spec(name, path, target)
sys.meta_path[:] = [one for one in sys.meta_path if one is not PathFinder] + [Hidden]
from device.runtime.session import open_session
from device.errors import SessionError
try:
    open_session(sys.argv[1])
except SessionError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert f"is not installed; {pip_install('portable')}" in done.stdout


def test_the_board_loads_no_runtime_before_it_is_asked_to() -> None:
    code = (
        "import sys, device.runtime.session; "
        "print([n for n in ('onnx', 'onnxruntime', 'toolkit', 'safetensors') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def rewritten(path: Path, network: Network, **entries: np.ndarray) -> Path:
    """The network's engine with some entries replaced: `gpu_0` is the model of segment gpu.0."""
    manifest, arrays = engine_parts(network)
    renamed = {
        f"portable/{key.replace('_', '.')}.onnx" if "_" in key else key: value
        for key, value in entries.items()
    }
    write_engine(path / "e", manifest, arrays | renamed)
    return path / "e"


def test_a_model_that_onnxruntime_refuses_names_its_segment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = rewritten(tmp_path, single_network(), gpu_0=np.arange(50, dtype=np.uint8))
    with pytest.raises(SessionError) as caught:
        open_session(path)
    message = str(caught.value)
    assert "segment 'gpu.0' cannot be loaded by onnxruntime: " in message
    assert "\n" not in message
    assert caught.value.__cause__ is not None
    assert capfd.readouterr() == ("", "")


def test_a_weight_of_another_shape_names_its_segment(tmp_path: Path) -> None:
    path = rewritten(tmp_path, single_network(), w3=np.zeros((16, 11), np.float32))
    with pytest.raises(SessionError, match=r"segment 'gpu\.0' cannot be loaded .* dimensions"):
        open_session(path)


def test_a_model_that_does_not_have_the_segments_tensors_is_refused(tmp_path: Path) -> None:
    manifest, arrays = engine_parts(split_network())
    arrays["portable/gpu.0.onnx"] = arrays["portable/gpu.1.onnx"]
    segment = manifest.segments[0]
    bare = changed(segment, implementations=(changed(segment.implementations[0], weights=()),))
    write_engine(tmp_path / "e", changed(manifest, segments=(bare, *manifest.segments[1:])), arrays)
    message = r"'gpu\.0' has the inputs 'x' \(float32\), its model 'r2' \(float32\)"
    with pytest.raises(SessionError, match=message):
        open_session(tmp_path / "e")


def test_a_model_that_makes_another_type_than_its_manifest_says_is_refused(
    tmp_path: Path,
) -> None:
    network = split_network()
    tensors = tuple(
        TensorInfo(name=one.name, dtype="float16", shape=one.shape) if one.name == "y" else one
        for one in network.tensors
    )
    manifest, arrays = engine_parts(network)
    write_engine(tmp_path / "e", changed(manifest, tensors=tensors), arrays)
    with pytest.raises(SessionError, match=r"outputs 'y' \(float16\), its model 'y' \(float32\)"):
        open_session(tmp_path / "e")


def test_a_shape_that_the_manifest_does_not_promise_stops_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manifest, arrays = engine_parts(single_network())
    tensors = tuple(
        changed(one, shape=(1, 5)) if one.name == "y" else one for one in manifest.tensors
    )
    write_engine(tmp_path / "e", changed(manifest, tensors=tensors), arrays)
    message = r"segment 'gpu\.0' failed in onnxruntime"
    with open_session(tmp_path / "e") as session, pytest.raises(SessionError, match=message):
        session.infer({"x": picture()})
    assert capfd.readouterr() == ("", "")


def test_weights_are_never_read_from_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = single_network()
    manifest, arrays = engine_parts(network)
    segment = manifest.segments[0]
    names = tuple(name for name in segment.implementations[0].weights if name != "w3")
    stolen = changed(segment, implementations=(changed(segment.implementations[0], weights=names),))
    (tmp_path / "engine").write_bytes(arrays["w3"].tobytes())  # what the model names
    write_engine(tmp_path / "e", changed(manifest, segments=(stolen,)), arrays)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SessionError, match=r"segment 'gpu\.0' cannot be loaded"):
        open_session(tmp_path / "e")


def test_more_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    network = split_network("batch", most=500_000)
    path = write_network(tmp_path / "e", network)
    with open_engine(path) as engine:
        needed = engine.manifest.memory.arena_bytes
    assert needed > 2_000_000_000
    code = "import sys; from device.runtime.arrays import take_arena as take; "
    code += "take(int(sys.argv[1]), 'it')"
    free = arrays._available_bytes()
    assert free is not None
    with pytest.raises(SessionError, match=f"it needs {free * 4} bytes for its tensors, .* free"):
        arrays.take_arena(free * 4, "it")
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); {code}"
    done = subprocess.run(
        [sys.executable, "-c", limited, str(needed)], capture_output=True, text=True, check=False
    )
    assert "SessionError: it needs" in done.stderr.splitlines()[-1]


def test_an_output_that_does_not_fit_into_memory_is_one_sentence(tmp_path: Path) -> None:
    network = single_network()
    shape = (2**31 - 1,)
    nodes = (
        node("ReduceSum", ("x",), "sum", keepdims=0),
        node("Constant", (), "wide", value_ints=shape),
        node("Expand", ("sum", "wide"), "y"),
    )
    huge = replace(
        network,
        pieces=(Piece("gpu.0", "gpu", nodes, ("x",), ("y",)),),
        weights={},
        tensors=(network.tensor("x"), TensorInfo(name="y", dtype="float32", shape=shape)),
    )
    path = write_network(tmp_path / "e", huge)
    code = """
import resource, sys
import numpy as np
from device.runtime.session import open_session
session = open_session(sys.argv[1], threads=1)
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
session.infer({"x": np.zeros((1, 3, 16, 16), np.float32)})
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    message = "SessionError: there is no memory for output 'y' of shape [2147483647]"
    assert message in done.stderr.splitlines()[-1]


def test_an_engine_without_a_memory_plan_runs_too(tmp_path: Path) -> None:
    network = split_network("batch")
    manifest, arrays = engine_parts(network)
    bare = changed(manifest, memory=MemoryPlan(arena_bytes=0, buffers=()))
    write_engine(tmp_path / "e", bare, arrays)
    feeds = {"x": picture(3)}
    with open_session(tmp_path / "e", threads=1) as session:
        assert session.infer(feeds)["y"].tobytes() == whole_run(network, feeds)["y"].tobytes()


def test_a_closed_session_says_so(tmp_path: Path) -> None:
    session = opened(tmp_path, single_network())
    session.close()
    session.close()
    with pytest.raises(SessionError, match="the session is closed; open a new one"):
        session.infer({"x": picture()})


def test_a_session_outlives_the_engine_that_it_was_made_of(tmp_path: Path) -> None:
    path = write_network(tmp_path / "e", split_network())
    with open_engine(path) as engine:
        session = Session(engine, threads=1)
        expected = session.infer({"x": picture()})["y"]
    path.unlink()
    assert session.infer({"x": picture()})["y"].tobytes() == expected.tobytes()


def test_portable_runs_wherever_onnxruntime_is() -> None:
    assert portable.why_not() is None
