"""`tandem compare A B`: figures, verdicts, layers, and the first node that differs."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from model_fixtures import save, small_convnet
from onnx import helper, numpy_helper

from device.engine.file import open_engine
from device.errors import TandemError
from toolkit.build import BuildOptions, build_engine
from toolkit.cli.main import tandem
from toolkit.evaluate.agreement.compare import Compared, _Rows
from toolkit.evaluate.agreement.figures import DECADES, Tally
from toolkit.evaluate.agreement.report import compared_text
from toolkit.evaluate.agreement.tolerance import Tolerance, Tolerances, lower
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_convnet(
        tmp_path_factory.mktemp("agreement") / "net.onnx", np.random.default_rng(11)
    )


def run(*arguments: object) -> Result:
    return CliRunner().invoke(tandem, ["compare", *map(str, arguments)], catch_exceptions=False)


def with_changed(path: Path, out: Path, name: str, factor: float) -> Path:
    """The model with one output channel of a weight scaled."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name == name:
            array = numpy_helper.to_array(tensor).copy()
            array[3] *= factor
            tensor.CopyFrom(numpy_helper.from_array(array, name))
    onnx.save(model, out)
    return out


def test_figures_are_those_of_all_samples_together(rng: np.random.Generator) -> None:
    a, b = rng.normal(size=(2, 3, 4, 5))
    b = a + rng.normal(size=a.shape) * 10.0 ** rng.integers(-11, 1, a.shape)
    b[0, 0, :2] = a[0, 0, :2]
    b[1, 2, 3], a[1, 2, 3] = 0.0, 0.25
    tally = Tally(Tolerance(1e-3, 1e-2))
    for one, second in zip(a, b, strict=True):
        tally.add(one, second)
    actual, error = tally.figures(), np.abs(a - b)
    assert actual.elements == a.size
    assert actual.equal == (a == b).sum()
    assert actual.max_abs == error.max()
    assert actual.max_rel == (error[b != 0] / np.abs(b[b != 0])).max()
    assert actual.mean_abs == pytest.approx(error.mean())
    assert actual.sqnr_db == pytest.approx(10 * math.log10((b**2).sum() / (error**2).sum()))
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    assert actual.cosine == pytest.approx((a * b).sum() / norms)
    assert actual.argmax == (a.argmax(-1) == b.argmax(-1)).mean()
    assert actual.beyond == (~np.isclose(a, b, rtol=1e-2, atol=1e-3)).sum()
    edges = [0.0, *(10.0**power for power in DECADES), math.inf]
    counts = [
        int(((error > low) & (error <= high)).sum()) for low, high in itertools.pairwise(edges)
    ]
    assert list(actual.histogram) == counts
    assert actual.worst is not None
    assert error[(actual.worst.sample, *actual.worst.index)] == error.max()


@pytest.mark.parametrize(
    ("a", "b", "beyond"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0),
        ([1.0, math.inf], [1.0, math.inf], 0),
        ([1.0, math.inf], [1.0, -math.inf], 1),
        ([1.0, math.nan], [1.0, 2.0], 1),
    ],
)
def test_numbers_that_are_not_finite(a: list[float], b: list[float], beyond: int) -> None:
    tally = Tally(Tolerance(math.inf, 0.0))
    tally.add(np.array(a), np.array(b))
    assert (tally.beyond, tally.agrees) == (beyond, not beyond)
    assert tally.figures().cosine == 1.0


@pytest.mark.parametrize("shape", [(), (3,)])
def test_integers_that_float64_does_not_hold_are_told_apart(shape: tuple[int, ...]) -> None:
    a = np.full(shape, 2**60 + 1, np.int64)
    tally = Tally(Tolerance(0.0, 0.0))
    tally.add(a, a.copy())
    assert tally.agrees
    tally.add(a, a - 1)
    assert (tally.equal, tally.beyond, tally.figures().max_abs) == (a.size, a.size, 1.0)


def test_errors_too_large_for_their_squares_are_beyond_every_sqnr() -> None:
    tally = Tally(Tolerance(None, None, -1000.0))
    tally.add(np.array([1e300]), np.array([1.0]))
    assert tally.figures().sqnr_db == -math.inf
    assert not tally.agrees


@pytest.mark.parametrize(
    ("error", "tolerance", "agrees"),
    [
        (0.5, Tolerance(0.5, 0.0), True),
        (0.5, Tolerance(0.4999, 0.0), False),
        (0.5, Tolerance(0.0, 0.25), True),
        (0.5, Tolerance(0.0, 0.2499), False),
        (0.5, Tolerance(None, None, 12.04), True),  # 10 log10(2^2 / 0.5^2) = 12.041
        (0.5, Tolerance(None, None, 12.05), False),
    ],
)
def test_a_tensor_agrees_up_to_its_tolerance(
    error: float, tolerance: Tolerance, agrees: bool
) -> None:
    tally = Tally(tolerance)
    tally.add(np.array([2.0 + error]), np.array([2.0]))
    assert tally.agrees == agrees


def test_a_tolerance_is_that_of_its_tensor() -> None:
    stated = Tolerances(atol={"": 1e-3, "y": 2.0})
    assert stated.of("y", "fp32") == Tolerance(2.0, 0.0)
    assert stated.of("z", "int8") == Tolerance(1e-3, 0.0)
    assert Tolerances().of("z", "fp16") == Tolerance(1e-2, 1e-2)
    assert Tolerances().of("z", "bf16") == Tolerance(8e-2, 8e-2)
    assert Tolerances().of("z", "fp16", whole=True) == Tolerance(0.0, 0.0)
    assert stated.of("z", "fp32", whole=True) == Tolerance(1e-3, 0.0)
    for lossy in ("int8", "fp8", "fp16 with INT4 weights"):
        assert not Tolerances().of("z", lower(lossy, "bf16")).judges
        assert lower("bf16", lossy) == lossy
    assert lower("bf16", "fp16") == lower("fp16", "bf16") == "bf16"
    assert Tolerances(sqnr_db={"": 20.0}).of("z", "fp32") == Tolerance(None, None, 20.0)


def test_a_model_its_engine_and_what_they_gave_agree(net: Path, tmp_path: Path) -> None:
    engine = build_engine(net, "laptop", tmp_path / "net.engine", BuildOptions()).path
    saved = tmp_path / "y.npz"
    command = ["infer", str(engine), "--random", "5", "--samples", "2", "--save", str(saved)]
    assert CliRunner().invoke(tandem, command).exit_code == 0
    for pair in ((net, engine), (engine, saved), (saved, net), (saved, saved)):
        done = run(*pair, "--random", 5, "--samples", 2)
        assert done.exit_code == 0, done.output
        assert done.stdout.rstrip().endswith("A and B agree")


def test_a_change_is_seen_by_output_and_layer_and_exit_status(net: Path, tmp_path: Path) -> None:
    second = with_changed(net, tmp_path / "other.onnx", "w1", 1.05)
    done = run(net, second, "--layers", "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["agrees"]) == (1, False)
    verdicts = {row["tensor"]: row["agrees"] for row in document["layers"]}
    assert [name for name, agrees in verdicts.items() if agrees] == ["c0", "r0"]
    assert document["layers"][2]["node"] == "conv1"
    assert run(net, second, "--atol", "1").exit_code == 0
    assert run(net, second, "--atol", "1", "--atol", "y:1e-6").exit_code == 1
    with pytest.raises(TandemError, match=r"--atol q: no such tensor .* there are y"):
        run(net, second, "--atol", "q:1")


@pytest.mark.parametrize(("weight", "node"), [("w0", "conv0"), ("w1", "conv1"), ("w2", "fc")])
def test_bisection_writes_the_first_node_that_differs(
    net: Path, tmp_path: Path, weight: str, node: str
) -> None:
    second = with_changed(net, tmp_path / "other.onnx", weight, 1.5)
    done = run(net, second, "--bisect", "--out", tmp_path / "found", "--json")
    actual = json.loads(done.stdout)["bisect"]
    assert (done.exit_code, actual["nodes"], actual["alone_agrees"]) == (1, [node], False)
    part = onnx.load(tmp_path / "found/node.onnx")
    onnx.checker.check_model(part, full_check=True)
    assert [one.name for one in part.graph.node] == [node]
    (command,) = actual["commands"]
    again = CliRunner().invoke(tandem, command.split()[1:], catch_exceptions=False)
    assert again.exit_code == 1
    assert f"A and B DIFFER: {actual['tensor']}" in again.stdout


def branches(path: Path, slope: float, bias: float) -> Path:
    """x -> a long branch that hides its difference, and a short one that shows its own.

    In running order the hidden one comes first: e = Relu(-|x| - bias) is 0 whatever bias is.
    """
    nodes = [
        helper.make_node("Abs", ["x"], ["a"], "abs"),
        helper.make_node("Neg", ["a"], ["n"], "neg"),
        helper.make_node("Sub", ["n", "bias"], ["s"], "sub"),
        helper.make_node("Relu", ["s"], ["e"], "relu"),
        helper.make_node("Mul", ["x", "slope"], ["m"], "mul"),
        helper.make_node("Tanh", ["m"], ["t"], "tanh"),
        helper.make_node("Add", ["e", "t"], ["y"], "add"),
    ]
    weights = {"slope": np.float32([slope]), "bias": np.float32([bias])}
    return save(path, nodes, {"x": [8]}, {"y": [8]}, weights)


def test_bisection_finds_what_differs_first_though_it_hides_later(tmp_path: Path) -> None:
    a = branches(tmp_path / "a.onnx", 1.0, 0.0)
    b = branches(tmp_path / "b.onnx", 2.0, 1.0)
    done = run(a, b, "--bisect", "--out", tmp_path / "found", "--json")
    assert json.loads(done.stdout)["bisect"]["nodes"] == ["sub"]
    b = branches(tmp_path / "b.onnx", 2.0, 0.0)
    done = run(a, b, "--bisect", "--out", tmp_path / "found", "--json")
    assert json.loads(done.stdout)["bisect"]["nodes"] == ["mul"]


def two_outputs(path: Path, first: float, second: float) -> Path:
    """x -> y, whose node runs last, and x -> z, whose node runs before it."""
    nodes = [
        helper.make_node("Abs", ["x"], ["a"], "abs"),
        helper.make_node("Mul", ["a", "second"], ["m"], "scale"),
        helper.make_node("Tanh", ["m"], ["z"], "tanh"),
        helper.make_node("Mul", ["x", "first"], ["y"], "last"),
    ]
    weights = {"first": np.float32([first]), "second": np.float32([second])}
    return save(path, nodes, {"x": [8]}, {"y": [8], "z": [8]}, weights)


def test_bisection_finds_the_first_node_of_all_differing_outputs(tmp_path: Path) -> None:
    a, b = two_outputs(tmp_path / "a.onnx", 1, 1), two_outputs(tmp_path / "b.onnx", 2, 2)
    done = run(a, b, "--bisect", "--out", tmp_path / "found", "--json")
    assert json.loads(done.stdout)["bisect"]["nodes"] == ["scale"]


def texts(path: Path, factor: int) -> Path:
    nodes = [
        helper.make_node("Mul", ["x", "factor"], ["m"], "mul"),
        helper.make_node("Cast", ["m"], ["s"], "text", to=onnx.TensorProto.STRING),
        helper.make_node("Identity", ["s"], ["y"], "copy"),
    ]
    model = onnx.load(save(path, nodes, {"x": [4]}, {"y": [4]}, {"factor": np.float32([factor])}))
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.STRING
    onnx.save(model, path)
    return path


def test_strings_are_compared_and_bisected(tmp_path: Path) -> None:
    one, two = texts(tmp_path / "a.onnx", 1), texts(tmp_path / "b.onnx", 3)
    assert run(one, one).exit_code == 0
    done = run(one, two, "--bisect", "--out", tmp_path / "found")
    assert done.exit_code == 1
    assert "4 of 4 strings differ" in done.stdout
    assert "mul (Mul)" in done.stdout
    done = run(one, two, "--atol", "99", "--bisect", "--out", tmp_path / "text", "--json")
    assert json.loads(done.stdout)["bisect"]["nodes"] == ["text"]
    # Equal numbers before it, so that the strings alone differ: the part runs again.
    part = tmp_path / "text"
    again = run(part / "node.onnx", part / "other.onnx", "--input", part / "inputs.npz")
    assert (again.exit_code, "differ" in again.stdout) == (0, False)


def test_the_sample_that_differs_need_not_have_the_largest_error(tmp_path: Path) -> None:
    """Of sample 1 the error is larger, but within the relative tolerance."""

    def model(path: Path, factor: float, offset: float) -> Path:
        nodes = [helper.make_node("Mul", ["x", "f"], ["m"], name="mul"),
                 helper.make_node("Add", ["m", "o"], ["y"], name="add")]  # fmt: skip
        weights = {"f": np.array(factor, np.float32), "o": np.array(offset, np.float32)}
        return save(path, nodes, {"x": [2]}, {"y": [2]}, weights)

    feeds = [{"x": np.full(2, value, np.float32)} for value in (1.0, 1e6)]
    one, two = model(tmp_path / "a.onnx", 1.0005, 0.1), model(tmp_path / "b.onnx", 1.0, 0.0)
    options = (
        "--input",
        saved(tmp_path / "x.npz", *feeds),
        "--bisect",
        "--out",
        tmp_path / "found",
    )
    done = run(one, two, *options, "--json")
    assert json.loads(done.stdout)["bisect"]["nodes"] == ["add"]


def test_errors_that_add_up_are_told_from_a_node_that_differs(tmp_path: Path) -> None:
    """Each Mul is off by 0.06 %, within 0.1 %: the second one is beyond, and not by itself."""

    def chain(path: Path, factor: float) -> Path:
        nodes = [
            helper.make_node("Mul", [before, "f"], [after], f"mul_{after}")
            for before, after in (("x", "p"), ("p", "q"), ("q", "y"))
        ]
        return save(path, nodes, {"x": [16]}, {"y": [16]}, {"f": np.float32([factor])})

    done = run(
        chain(tmp_path / "a.onnx", 1.0), chain(tmp_path / "b.onnx", 1.0006), "--bisect",
        "--atol", "1e-9", "--rtol", "1e-3", "--out", tmp_path / "found", "--json",
    )  # fmt: skip
    actual = json.loads(done.stdout)["bisect"]
    assert actual["nodes"] == ["mul_q"]
    assert actual["alone_agrees"] is True


def test_an_engine_is_bisected_to_what_it_shows(net: Path, tmp_path: Path) -> None:
    engine = build_engine(net, "laptop", tmp_path / "net.engine", BuildOptions()).path
    second = with_changed(net, tmp_path / "other.onnx", "w1", 1.5)
    done = run(second, engine, "--bisect", "--out", tmp_path / "found", "--json")
    actual = json.loads(done.stdout)["bisect"]
    assert actual["nodes"] == ["conv1", "bn1"]  # fused in the engine
    again = [CliRunner().invoke(tandem, line.split()[1:]) for line in actual["commands"]]
    # Against what the engine gave it differs; an engine of the part itself agrees with the part.
    assert [done.exit_code for done in again] == [1, 0, 0], again[1].output


def test_an_int8_engine_is_judged_by_what_is_stated(net: Path, tmp_path: Path) -> None:
    data = tmp_path / "x.npy"
    np.save(data, np.random.default_rng(3).normal(size=(4, 3, 32, 32)).astype(np.float32))
    options = BuildOptions(data=data)
    engine = build_engine(net, "laptop", tmp_path / "i.engine", options).path
    done = run(engine, net, "--data", data)
    assert done.exit_code == 0, done.output
    assert "not judged" in done.stdout
    assert f"tandem compare {engine} --model {net}" in done.stdout
    assert run(engine, net, "--data", data, "--min-sqnr", "10").exit_code == 0
    assert run(engine, net, "--data", data, "--min-sqnr", "90").exit_code == 1
    # Tensors between have no tolerance, so that none of them could be the first to differ.
    only_y = ("--min-sqnr", "y:90", "--bisect", "--out", tmp_path / "found")
    with pytest.raises(TandemError, match="for all tensors"):
        run(engine, net, "--data", data, *only_y)


def test_other_names_are_matched_by_position_and_said(tmp_path: Path) -> None:
    one = save(
        tmp_path / "a.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": [4]}, {"y": [4]}
    )
    two = save(
        tmp_path / "b.onnx", [helper.make_node("Relu", ["u"], ["v"])], {"u": [4]}, {"v": [4]}
    )
    done = run(one, two)
    assert done.exit_code == 0
    assert "inputs are matched by position: x -> u" in done.stdout
    assert "outputs are matched by position: y -> v" in done.stdout


def saved(path: Path, *samples: dict[str, np.ndarray]) -> Path:
    np.savez(path, **{f"{i}:{name}": a for i, s in enumerate(samples) for name, a in s.items()})
    return path


def test_classes_of_other_numbers_differ(tmp_path: Path) -> None:
    one, two = ({"ids": np.array([5000 + n])} for n in range(2))
    assert run(saved(tmp_path / "a.npz", one), saved(tmp_path / "b.npz", one)).exit_code == 0
    assert run(saved(tmp_path / "a.npz", one), saved(tmp_path / "c.npz", two)).exit_code == 1


def test_what_is_in_one_file_alone_is_said(tmp_path: Path) -> None:
    y, z = np.ones(3, np.float32), np.zeros(3, np.float32)
    done = run(saved(tmp_path / "a.npz", {"y": y, "z": z}), saved(tmp_path / "b.npz", {"y": y}))
    assert done.exit_code == 1
    assert "a.npz has it  DIFFERS" in done.stdout
    net = save(
        tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": [3]}, {"y": [3]}
    )
    feeds = saved(tmp_path / "x.npz", {"x": y})
    done = run(net, saved(tmp_path / "c.npz", {"y": y}, {"y": z}), "--input", feeds)
    assert done.exit_code == 0
    assert "c.npz" in done.stdout
    assert "compared: 1 of the 2 samples in" in done.stdout


def test_no_sample_is_no_agreement(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz")
    with pytest.raises(TandemError, match="there is no sample"):
        run(tmp_path / "none.npz", tmp_path / "none.npz")


def test_nan_differs_without_a_tolerance() -> None:
    rows = _Rows(Tolerances(), "int8", {})
    rows.add("y", np.array([1.0, np.nan]), np.array([1.0, 2.0]))
    rows.add("z", np.array([1.0]), np.array([2.0]))
    assert [row.agrees for row in rows.rows()] == [False, None]


def test_outputs_without_a_tolerance_are_named() -> None:
    sample = {"y": np.ones(3, np.float32), "z": np.zeros(3, np.float32)}
    rows = _Rows(Tolerances(atol={"y": 0.0}), "int8", {})
    for name, array in sample.items():
        rows.add(name, array, array)
    compared = Compared("a", "b", ("int8", "int8"), "1 sample", rows.rows(), None)
    assert compared_text(compared, every=False).endswith("A and B agree; not judged: z")


def test_a_folder_that_cannot_be_made_is_refused(net: Path, tmp_path: Path) -> None:
    second = with_changed(net, tmp_path / "other.onnx", "w1", 1.5)
    with pytest.raises(TandemError, match="cannot make the folder"):
        run(second, net, "--bisect", "--out", second)


def test_other_shapes_differ(tmp_path: Path) -> None:
    def model(path: Path, axis: int) -> Path:
        node = helper.make_node("Flatten", ["x"], ["y"], axis=axis)
        return save(path, [node], {"x": [2, 3, 4]}, {"y": None})

    done = run(model(tmp_path / "a.onnx", 1), model(tmp_path / "b.onnx", 2))
    assert done.exit_code == 1
    assert "the shapes are 2x12 and 6x4" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("y.npz", "net.onnx"), "nothing says what they were computed on"),
        (
            ("y.npz", "net.onnx", "--random", "0", "--samples", "2"),
            "holds 1 samples, the inputs more",
        ),
        (("other.onnx", "net.onnx"), "no output of the same name: p, q and y"),
        (("y.npz", "z.npz", "--bisect"), "neither A nor B is one"),
        (("two.onnx", "net.onnx"), "two.onnx takes x, w, net.onnx takes x: compare models with"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...],
    message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.onnx").write_bytes(net.read_bytes())
    np.savez("y.npz", y=np.zeros((1, 10), np.float32))
    np.savez("z.npz", y=np.ones((1, 10), np.float32))
    nodes = [helper.make_node("Relu", ["x"], ["p"]), helper.make_node("Abs", ["x"], ["q"])]
    shape = [1, 3, 32, 32]
    save(tmp_path / "other.onnx", nodes, {"x": shape}, {"p": shape, "q": shape})
    add = helper.make_node("Add", ["x", "w"], ["y"])
    save(tmp_path / "two.onnx", [add], {"x": shape, "w": shape}, {"y": shape})
    with pytest.raises(TandemError, match=message) as refused:
        run(*arguments)
    assert refused.value.exit_status == 2


def test_what_could_not_run_ends_with_status_2_and_one_sentence(tmp_path: Path) -> None:
    command = "import sys; from toolkit.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "compare", "none.onnx", "none.npz"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip() == "error: there is no file none.onnx; check the path"


def test_an_emulated_segment_shows_its_layers(tmp_path: Path) -> None:
    """--layers with --dla: what a DLA segment computes inside, not what it passes on alone."""
    rng = np.random.default_rng(5)
    net = small_convnet(tmp_path / "net.onnx", rng, size=64)
    data = tmp_path / "x.npz"
    np.savez(data, x=rng.standard_normal((4, 3, 64, 64)).astype(np.float32))
    options = BuildOptions(
        precision="int8", data=data, kernels=False, plan=PlanOptions(forced=Forced(dla=("all",)))
    )
    engine = tmp_path / "net.engine"
    build_engine(net, "agx-orin-64gb", engine, options)
    with open_engine(engine) as opened:
        inside = [s for s in opened.manifest.segments if s.processor.startswith("dla")]
        borders = {name for s in opened.manifest.segments for name in s.outputs}
    assert inside
    show = ("--layers", "--nodes", "--dla", "fast", "--json")
    done = run(net, engine, "--random", "0", "--samples", "1", *show)
    document = json.loads(done.stdout)
    assert len({row["tensor"] for row in document["layers"]} - borders) > 2
    assert not [note for note in document["notes"] if "shows no tensors" in note]


@pytest.mark.parametrize(
    "arguments",
    [
        ("m.onnx",),
        ("m.engine", "--model", "m.onnx", "--profile", "laptop"),
        ("m.engine", "--model", "m.onnx", "--bisect"),
        ("a.onnx", "b.onnx", "--recorded", "r.npz"),
        ("a.onnx", "b.onnx", "--out", "d"),
        ("a.onnx", "b.onnx", "--atol", "y=1"),
    ],
)
def test_options_of_the_other_form_are_usage_errors(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2
