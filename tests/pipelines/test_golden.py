"""Golden inputs: what a bundle recorded, and what a board makes of it before a trial."""

import json
import shutil
import time
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from golden_fixtures import ON_DOUBLES, engine_of, packed
from tensorrt_fixtures import build as build_for_dla
from tensorrt_fixtures import install, prepare_all

from device.agent.golden_check import GoldenCheck, GoldenEnded, Result, golden_refusal
from device.errors import BundleError
from device.protocol.documents import InstallPolicy
from device.runtime.golden import check_golden, garbage_in, record_golden, share_within
from device.runtime.golden import main as golden_main
from device.session import open_session
from device.update.bundle import (
    ENGINE,
    GOLDEN,
    extract_bundle,
    hash_folder,
    read_bundle_info,
    read_folder_info,
)
from toolkit.cli.commands.bundle import bundle as bundle_command

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two engines of one network with other weights."""
    folder = tmp_path_factory.mktemp("engines")
    return engine_of(folder / "one", 1), engine_of(folder / "other", 2)


@pytest.fixture(scope="module")
def slot(tmp_path_factory: pytest.TempPathFactory, engines: tuple[Path, Path]) -> Path:
    """The unpacked bundle of the first engine, with golden inputs."""
    folder = tmp_path_factory.mktemp("slot")
    options = ("--golden", "4", "--metric", "top1=0.7", "--requires", "memory_mb=500")
    made_of = ("--made-of", f"model={engines[0]}", "--licence", "MIT", "--min-version-floor", "0.1")
    bundle = packed(folder, engines[0], "a.bundle", *options, *made_of)
    again = packed(folder, engines[0], "b.bundle", *options, *made_of)
    assert bundle.read_bytes() == again.read_bytes()
    extract_bundle(bundle, folder / "slot")
    assert hash_folder(folder / "slot")[2] == bundle.stat().st_size
    return folder / "slot"


def test_a_bundle_says_what_it_is(slot: Path) -> None:
    info = read_bundle_info(slot.parent / "a.bundle")
    assert info.golden is not None
    assert info.golden.samples == 4
    assert info.metrics["top1"] == 0.7
    assert info.measured_by["top1"] == "stated with `tandem bundle --metric`"
    assert info.requires == {"memory_mb": "500"}
    assert (info.licence, info.min_version_floor) == ("MIT", "0.1")
    assert set(info.hashes) == {"model"}
    assert json.loads((slot / "bundle.json").read_bytes())["files"][-2]["name"] == GOLDEN


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--golden", "nowhere", "neither a number nor a folder of pictures"),
        ("--golden", "65", "a bundle takes 1 to 64"),
        ("--golden", "0", "a bundle takes 1 to 64"),
        ("--metric", "top1", "write NAME=VALUE"),
        ("--metric", "top1=good", "is no number"),
        ("--requires", "tpu=1", "a board has no tpu"),
        ("--made-of", "code=x", "is none of model, data, table"),
        ("--made-of", "model=nowhere", "cannot read nowhere"),
    ],
)
def test_an_option_that_is_wrong_is_one_sentence(
    option: str, value: str, says: str, slot: Path, engines: tuple[Path, Path]
) -> None:
    folder = slot.parent
    files = ("--pipeline", str(folder / "pipeline.toml"), "--labels", str(folder / "labels.txt"))
    arguments = [str(engines[0]), *files, "-o", str(folder / "x.bundle"), option, value]
    result = CliRunner().invoke(bundle_command, arguments)
    assert result.exit_code != 0
    assert says in str(result.exception or result.output)
    assert not (folder / "x.bundle").exists()


def test_no_engine_hides_behind_another_one_whose_file_has_the_same_name(
    engines: tuple[Path, Path],
    slot: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    same, changed = engines
    shutil.copy(slot / GOLDEN, tmp_path / GOLDEN)
    pairs = (changed, slot / GOLDEN, same, tmp_path / GOLDEN)
    words = ["golden", *map(str, pairs), "--tolerance", "0.02"]
    monkeypatch.setattr("sys.argv", words)
    assert golden_main() == 0
    result = json.loads(capsys.readouterr().out)
    assert result["agreement"] < 1.0
    assert result["samples"] == 8


def test_the_same_engine_agrees_and_one_with_other_weights_does_not(
    slot: Path, engines: tuple[Path, Path]
) -> None:
    with open_session(slot / ENGINE) as session:
        same = check_golden(session, slot / GOLDEN, 0.02)
    assert (same.samples, same.agreement) == (4, 1.0)
    assert same.latency_p95_ms > 0.0
    with open_session(engines[1]) as session:
        changed = check_golden(session, slot / GOLDEN, 0.02)
    assert changed.agreement < 0.5
    result = msgspec.convert(changed, Result, from_attributes=True)
    reason = golden_refusal(GoldenEnded(0, result), InstallPolicy())
    assert reason is not None
    assert "of the values of its output y agree" in reason


def test_golden_inputs_that_unpack_to_a_thousandfold_are_refused_unread(
    slot: Path, tmp_path: Path
) -> None:
    bomb = tmp_path / "golden.npz"
    np.savez_compressed(bomb, in_0_0=np.zeros(1 << 26, np.uint8))
    assert bomb.stat().st_size < (1 << 26) / 900
    tracemalloc.start()  # of numpy's arrays, too
    try:
        message = r"golden\.npz .* bytes unpacked, the limit is"
        with open_session(slot / ENGINE) as session, pytest.raises(BundleError, match=message):
            check_golden(session, bomb, 0.02)
        assert tracemalloc.get_traced_memory()[1] < 1 << 25
    finally:
        tracemalloc.stop()


def test_the_child_says_what_it_measured_or_why_it_could_not(slot: Path, tmp_path: Path) -> None:
    events: list[GoldenEnded] = []
    check = GoldenCheck(events.append)

    def run(folder: Path) -> GoldenEnded:
        events.clear()
        assert check.start(folder)
        end_s = time.monotonic() + PATIENCE_S
        while not events:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        assert check.ended(events[0].run)
        assert not check.ended(events[0].run)  # it is known
        return events[0]

    good = run(slot)
    assert good.result is not None
    assert good.result.agreement == 1.0
    broken = tmp_path / "slot"
    broken.mkdir()
    for path in slot.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / GOLDEN).write_bytes(b"no arrays")
    bad = run(broken)
    assert bad.result is None
    assert "has no golden inputs that fit the engine" in bad.problem
    assert "cannot be run on this board" in (golden_refusal(bad, InstallPolicy()) or "")


@pytest.mark.parametrize(
    ("share", "policy", "refused"),
    [
        (0.95, InstallPolicy(), False),
        (0.9499, InstallPolicy(), True),
        (0.9499, InstallPolicy(min_golden_agreement=0.9), False),
        (1.0, InstallPolicy(max_latency_p95_ms=10.0), False),
        (1.0, InstallPolicy(max_latency_p95_ms=9.9), True),
    ],
)
def test_a_refusal_is_by_the_policy(share: float, policy: InstallPolicy, refused: bool) -> None:
    result = Result(samples=3, agreement=share, worst="y", latency_p95_ms=10.0)
    assert (golden_refusal(GoldenEnded(0, result), policy) is not None) == refused


def test_values_agree_within_a_share_of_their_range() -> None:
    expected = [np.array([0.0, 1.0, 10.0], np.float32)]
    actual = [np.array([0.19, 1.21, 10.0], np.float32)]
    assert share_within(actual, expected, 0.02) == pytest.approx(2 / 3)
    assert share_within([np.array([1, 2])], [np.array([1, 3])], 0.5) == 0.5  # not of a float type
    assert share_within([np.zeros(2)], [np.zeros(3)], 0.02) == 0.0
    special = [np.array([np.nan, np.inf, -np.inf, 1.0])]
    assert share_within(special, special, 0.0) == 1.0
    assert share_within([np.array([0.0, np.inf, np.inf, 1.0])], special, 0.0) == 0.5


# --- outputs that are no results


ONE = np.array([1.0, 0.0, 3.0], np.float32)
NOTHING = np.zeros(3, np.float32)
NAN = np.array([1.0, np.nan, 3.0], np.float32)
INF = np.array([1.0, np.inf, 3.0], np.float32)


@pytest.mark.parametrize(
    ("recorded", "actual", "says"),
    [
        ([{"y": ONE}], [{"y": ONE}], ""),
        ([{"y": ONE}], [{"y": ONE + 9}], ""),  # wrong, which others judge
        ([{"y": ONE}], [{"y": NAN}], "its output 'y' is not finite"),
        ([{"y": NAN}], [{"y": NAN}], "its output 'y' is not finite"),
        ([{"y": ONE}], [{"y": INF}], "its output 'y' is not finite"),
        ([{"y": INF}], [{"y": INF}], ""),  # a mask of the model
        ([{"y": INF}], [{"y": -INF}], "its output 'y' is not finite"),
        ([{"y": ONE}], [{"y": NOTHING}], "its output 'y' is 0 everywhere"),
        ([{"y": NOTHING}], [{"y": NOTHING}], "every output of it is 0 everywhere"),
        ([{"y": ONE, "n": NOTHING}], [{"y": ONE, "n": NOTHING}], ""),  # no objects
        ([{"y": ONE}, {"y": ONE}], [{"y": NOTHING}, {"y": ONE}], ""),  # one sample shows nothing
        ([{"y": ONE}, {"y": -ONE}], [{"y": ONE}, {"y": ONE}], "is the same, whatever its input"),
        ([{"y": ONE}, {"y": ONE}], [{"y": -ONE}, {"y": -ONE}], ""),
        ([{"y": ONE.astype(int)}], [{"y": NOTHING.astype(int)}], "its output 'y' is 0 everywhere"),
    ],
)
def test_outputs_that_are_no_results_are_told_from_wrong_ones(
    recorded: list[dict[str, np.ndarray]], actual: list[dict[str, np.ndarray]], says: str
) -> None:
    garbage = garbage_in(recorded, actual)
    assert says in garbage
    assert bool(says) == bool(garbage)


def test_no_policy_takes_outputs_that_are_no_results() -> None:
    result = Result(
        samples=4, agreement=1.0, worst="y", latency_p95_ms=1.0, garbage="its output 'y' is 0"
    )
    policy = InstallPolicy(min_golden_agreement=0.0)
    reason = golden_refusal(GoldenEnded(0, result), policy)
    assert reason is not None
    assert reason.startswith("its output 'y' is 0 for its 4 golden inputs on this board, without")


def test_inputs_that_show_nothing_are_not_packed(
    engines: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_session(engines[0]) as session:
        monkeypatch.setattr(session, "infer", lambda feeds: {"y": np.zeros((1, 10), np.float32)})
        feeds = {"x": np.ones((1, 3, 32, 32), np.float32)}
        with pytest.raises(BundleError, match="every output of it is 0 everywhere for all golden"):
            record_golden(session, [feeds], tmp_path / "golden.npz")
    assert not (tmp_path / "golden.npz").exists()


def test_a_board_whose_tensorrt_gives_no_results_refuses_the_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the double of TensorRT, in the child that the agent starts."""
    engine = build_for_dla(tmp_path, precision="fp16")
    folder = tmp_path / "slot"
    extract_bundle(packed(tmp_path, engine, "a.bundle", "--golden", "2"), folder)
    install("10.3.0", tmp_path, monkeypatch)
    rows = prepare_all(folder / ENGINE, tmp_path / "plans")
    assert {row.problem for row in rows} == {None}
    monkeypatch.setattr("device.agent.golden_check._TASKS", (*ON_DOUBLES, "pipelines.golden"))

    def check() -> GoldenEnded:
        events: list[GoldenEnded] = []
        command = (*ON_DOUBLES, "device.runtime.golden")
        GoldenCheck(events.append, plans=tmp_path / "plans", command=command).start(folder)
        end_s = time.monotonic() + PATIENCE_S
        while not events:
            assert time.monotonic() < end_s
            time.sleep(0.02)
        return events[0]

    policy = InstallPolicy(min_golden_agreement=0.0)
    good = check()
    assert good.result is not None, good.problem
    assert good.result.garbage == ""
    info = read_folder_info(folder)
    golden = msgspec.structs.replace(info.golden, limits={})
    of_an_earlier_version = msgspec.structs.replace(info, golden=golden)
    for outputs, says in (
        ("zero", "every output of it is the same, whatever"),
        ("nan", "its output 'y' is not finite"),
    ):
        monkeypatch.setenv("TENSORRT_DOUBLE_INJECT", f"outputs={outputs}")
        bad = check()
        assert bad.result is not None, bad.problem
        assert says in bad.result.garbage
        assert says in (golden_refusal(bad, policy) or "")
        (folder / "bundle.json").write_bytes(msgspec.json.encode(of_an_earlier_version))
