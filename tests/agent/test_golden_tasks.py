"""Golden inputs by task: what is counted, the limits that a build chooses, and one beyond them."""

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from bundle_fixtures import HEADS
from bundle_fixtures import engine_of as heads_engine
from click.testing import CliRunner
from golden_fixtures import PIPELINE, engine_of

from device.agent.golden_check import GoldenCheck, GoldenEnded, Result, golden_refusal
from device.errors import BundleError
from device.protocol.documents import InstallPolicy
from device.update.bundle import (
    ENGINE,
    GOLDEN,
    BundleFacts,
    Golden,
    GoldenLimit,
    extract_bundle,
    read_bundle_info,
    write_bundle,
)
from pipelines.config import parse_pipeline
from pipelines.golden import (
    MAX_SQNR_DB,
    Compared,
    check_folder,
    compare_outputs,
    sqnr_db,
    worst_for_limits,
)
from pipelines.model_config import PipelineModel
from toolkit.cli.commands.bundle import bundle as bundle_command
from toolkit.fleet.bundles.golden import _random, limit_of

PATIENCE_S = 120.0
HEAD = """
name = "p"
[source]
uri = "v4l2:///dev/video0"
[preprocess]
width = 64
height = 64
[decode]
"""


def model_of(decode: str) -> PipelineModel:
    return parse_pipeline(HEAD + decode, Path("pipeline.toml")).first


# -- what is counted

ROWS = model_of('kind = "rows"\noutput = "o"\n')
CLASSES = model_of('kind = "classification"\nscores = "o"\n')
DEPTH = model_of('kind = "depth"\noutput = "o"\n')


def rows(*values: tuple[float, ...]) -> dict[str, np.ndarray]:
    """The output of a detector: x1, y1, x2, y2, score, class."""
    return {"o": np.array([values], np.float32)}


TWO = ((0, 0, 20, 20, 0.9, 0), (30, 30, 60, 60, 0.8, 1))


@pytest.mark.parametrize(
    ("after", "agreement"),
    [
        (TWO, 1.0),
        ((TWO[1], TWO[0]), 1.0),  # the order is not counted
        (((1, 0, 21, 20, 0.7, 0), TWO[1]), 1.0),  # they still overlap
        (((14, 0, 34, 20, 0.9, 0), TWO[1]), 0.5),  # they do not by half
        (((0, 0, 20, 20, 0.9, 1), TWO[1]), 0.5),  # another class
        ((TWO[0], (30, 30, 60, 60, 0.1, 1)), 2 / 3),  # one is below the threshold
    ],
)
def test_objects_are_matched(after: tuple[tuple[float, ...], ...], agreement: float) -> None:
    compared = compare_outputs(ROWS, [rows(*TWO)], [rows(*after)])
    assert (compared.task, compared.noisiest) == ("objects", "o")
    assert compared.agreement == pytest.approx(agreement)


def test_the_best_class_is_compared_and_not_the_others() -> None:
    recorded = [{"o": np.array([[0.1, 0.7, 0.2]], np.float32)}] * 4
    same = {"o": np.array([[0.3, 0.4, 0.3]], np.float32)}
    second = {"o": np.array([[0.7, 0.1, 0.2]], np.float32)}
    compared = compare_outputs(CLASSES, recorded, [same, same, same, second])
    assert (compared.task, compared.agreement) == ("best classes", 0.75)


def test_depths_are_compared_by_their_values() -> None:
    depth = np.linspace(1.0, 9.0, 64 * 64, dtype=np.float32).reshape(1, 64, 64)
    compared = compare_outputs(DEPTH, [{"o": depth}], [{"o": depth + 0.01}])
    assert (compared.task, compared.agreement) == ("depths", 1.0)
    assert compare_outputs(DEPTH, [{"o": depth}], [{"o": depth[:, ::-1]}]).agreement < 0.5


def test_the_ratio_of_signal_and_difference() -> None:
    one = np.ones(100, np.float32)
    assert sqnr_db([one], [one]) == MAX_SQNR_DB
    assert sqnr_db([one], [one * 1.1]) == pytest.approx(20.0, abs=1e-4)
    assert sqnr_db([one], [one * 0]) == pytest.approx(0.0)
    assert sqnr_db([one * 0], [one]) == -MAX_SQNR_DB
    assert sqnr_db([one], [one[:50]]) == -MAX_SQNR_DB
    special = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert sqnr_db([special], [special]) == MAX_SQNR_DB
    assert sqnr_db([special], [np.array([np.nan, np.inf, np.inf, 1.0])]) == -MAX_SQNR_DB
    assert sqnr_db([np.array([1, 2])], [np.array([1, 2])]) == MAX_SQNR_DB
    assert sqnr_db([np.array([1e-160])], [np.array([1e10])]) == -MAX_SQNR_DB
    huge = np.array([1e200])
    assert sqnr_db([huge], [-huge]) == -MAX_SQNR_DB


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_noise_has_the_size_of_the_input_in_any_layout(layout: str) -> None:
    head = HEAD.replace("height = 64", f'height = 48\nlayout = "{layout}"')
    text = head + 'kind = "classification"\nscores = "o"\n'
    (image,) = _random(parse_pipeline(text, Path("pipeline.toml")).first, 1)
    assert image.shape == (48, 64, 3)


# -- limits


@pytest.mark.parametrize(
    ("agreement", "sqnr", "min_agreement", "min_sqnr"),
    [
        (1.0, MAX_SQNR_DB, 0.95, 40.0),  # no board is asked for more
        (1.0, 46.0, 0.95, 40.0),
        (0.9, 30.0, 0.85, 24.0),
        (0.55, 12.0, 0.5, 6.0),
        (0.2, 3.0, 0.5, 6.0),  # every board must reach so much
        (0.0, -MAX_SQNR_DB, 0.5, 6.0),
    ],
)
def test_limits_follow_what_was_measured(
    agreement: float, sqnr: float, min_agreement: float, min_sqnr: float
) -> None:
    limit = limit_of(Compared("objects", agreement, sqnr, "o"))
    assert (limit.min_agreement, limit.min_sqnr_db) == (min_agreement, min_sqnr)
    assert (limit.measured_agreement, limit.measured_sqnr_db) == (agreement, sqnr)


def result(agreement: float = 0.9, sqnr: float = 30.0, latency_ms: float = 5.0) -> Result:
    return Result(
        samples=3, agreement=agreement, worst="y", latency_p95_ms=latency_ms, task="objects",
        min_agreement=0.85, sqnr_db=sqnr, min_sqnr_db=24.0, noisiest="z",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("measured", "policy", "says"),
    [
        (result(0.85), InstallPolicy(), ""),
        (result(0.8499), InstallPolicy(), "84.99% of the objects of its output y agree"),
        (result(0.8499), InstallPolicy(), "at least 85.00% must (the bundle's own limit)"),
        (result(0.86), InstallPolicy(min_golden_agreement=0.87), "(min_golden_agreement of the"),
        (result(0.6), InstallPolicy(min_golden_agreement=0.5), ""),
        (result(sqnr=24.0), InstallPolicy(), ""),
        (result(sqnr=23.99), InstallPolicy(), "its output z differs from what the bundle recorded"),
        (result(sqnr=10.0), InstallPolicy(min_golden_agreement=0.1), "at least 24.0 dB are needed"),
        (result(latency_ms=9.0), InstallPolicy(max_latency_p95_ms=8.9), "the policy allows 8.9 ms"),
    ],
)
def test_a_board_is_held_to_the_limits_of_the_bundle(
    measured: Result, policy: InstallPolicy, says: str
) -> None:
    reason = golden_refusal(GoldenEnded(0, measured), policy)
    assert (reason is None) == (not says)
    assert says in (reason or "")


def test_of_several_models_the_one_nearest_to_its_limit_speaks() -> None:
    def row(
        agreement: float, least: float, sqnr: float, least_db: float
    ) -> tuple[Compared, GoldenLimit]:
        limit = GoldenLimit(
            task="objects", min_agreement=least, min_sqnr_db=least_db,
            measured_agreement=1.0, measured_sqnr_db=50.0,
        )  # fmt: skip
        return Compared("objects", agreement, sqnr, "o"), limit

    models = {"a": row(0.8, 0.5, 20.0, 10.0), "b": row(0.9, 0.85, 35.0, 34.0)}
    worst = worst_for_limits(models, 4, 7.0)
    assert (worst.worst, worst.agreement, worst.min_agreement) == ("b", 0.9, 0.85)
    assert (worst.noisiest, worst.sqnr_db, worst.min_sqnr_db) == ("b: o", 35.0, 34.0)


# -- from the pack to the board


def packed(folder: Path, engine: Path, pipeline: str, labels: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "pipeline.toml").write_text(pipeline)
    (folder / "labels.txt").write_text("".join(f"class {n}\n" for n in range(labels)))
    out = folder / "out.bundle"
    arguments = [
        str(engine), "--pipeline", str(folder / "pipeline.toml"), "--labels",
        str(folder / "labels.txt"), "--portable", "--golden", "3", "-o", str(out),
    ]  # fmt: skip
    done = CliRunner().invoke(bundle_command, arguments)
    assert done.exit_code == 0, done.exception
    return out


def checked(folder: Path) -> GoldenEnded:
    """Run the golden inputs of a slot as the agent does."""
    events: list[GoldenEnded] = []
    check = GoldenCheck(events.append)
    assert check.start(folder)
    end_s = time.monotonic() + PATIENCE_S
    while not events:
        assert time.monotonic() < end_s
        time.sleep(0.05)
    return events[0]


def test_a_bundle_records_limits_by_its_task_and_the_board_keeps_to_them(tmp_path: Path) -> None:
    engine = engine_of(tmp_path / "one", 1)
    bundle = packed(tmp_path / "in", engine, PIPELINE, 10)
    again = packed(tmp_path / "in2", engine, PIPELINE, 10)
    assert bundle.read_bytes() == again.read_bytes()
    golden = read_bundle_info(bundle).golden
    assert golden is not None
    limit = golden.limits[""]
    assert limit.task == "best classes"
    assert limit.min_sqnr_db == min(40.0, max(6.0, round(limit.measured_sqnr_db - 6.0, 1)))
    slot = tmp_path / "slot"
    extract_bundle(bundle, slot)
    good = checked(slot)
    assert good.result is not None, good.problem
    assert (good.result.task, good.result.agreement) == ("best classes", 1.0)
    assert good.result.min_agreement == limit.min_agreement
    assert golden_refusal(good, InstallPolicy()) is None
    # The same network with other weights, as if the board computed something else.
    (slot / ENGINE).write_bytes(engine_of(tmp_path / "other", 2).read_bytes())
    bad = checked(slot)
    assert bad.result is not None, bad.problem
    assert golden_refusal(bad, InstallPolicy()) is not None
    # Files that do not fit are a sentence.
    (slot / GOLDEN).write_bytes(b"no arrays")
    broken = checked(slot)
    assert broken.result is None
    assert "has no golden inputs that fit the engine" in broken.problem


def test_a_difference_at_the_limit_passes_and_one_beyond_does_not(tmp_path: Path) -> None:
    """The recorded outputs are moved by so much noise as the limit allows, and by a bit more."""
    bundle = packed(tmp_path / "in", engine_of(tmp_path / "one", 1), PIPELINE, 10)
    slot = tmp_path / "slot"
    info = extract_bundle(bundle, slot)
    assert info.golden is not None
    least_db = info.golden.limits[""].min_sqnr_db
    with np.load(slot / GOLDEN) as file:
        arrays = {name: file[name] for name in file.files}
    for gain_db, passes in ((0.05, True), (-0.05, False)):
        # c = r (1 + e) for all r: the actual outputs are 1 / (1 + e) of the recorded ones.
        share = 10.0 ** (-(least_db + gain_db) / 20.0)
        moved = {
            name: value / (1.0 - share) if name.startswith("out") else value
            for name, value in arrays.items()
        }
        np.savez_compressed(slot / GOLDEN, **moved)
        measured = check_folder(slot)
        assert measured.sqnr_db == pytest.approx(least_db + gain_db, abs=0.02)
        ended = GoldenEnded(0, msgspec.convert(measured, Result, from_attributes=True))
        assert (golden_refusal(ended, InstallPolicy()) is None) == passes


def test_a_detector_has_a_limit_of_its_own(tmp_path: Path) -> None:
    grid = 'kind = "ltrb_grid"\nboxes = "boxes"\nscores = "scores"\nstrides = [8, 16, 32]\n'
    (tmp_path / "heads").mkdir()
    bundle = packed(tmp_path / "in", heads_engine(tmp_path / "heads", HEADS), HEAD + grid, 3)
    golden = read_bundle_info(bundle).golden
    assert golden is not None
    assert golden.limits[""].task == "objects"


def test_limits_of_models_that_are_not_there_are_refused(tmp_path: Path) -> None:
    for name in ("e", "p", "l", "g"):
        (tmp_path / name).write_text(name)
    limit = GoldenLimit(
        task="objects", min_agreement=0.9, min_sqnr_db=20.0, measured_agreement=1.0,
        measured_sqnr_db=50.0,
    )  # fmt: skip
    facts = BundleFacts(golden=Golden(samples=1, tolerance=0.02, limits={"other": limit}))
    with pytest.raises(BundleError, match=r"limits of golden inputs for \['other'\]"):
        write_bundle(
            tmp_path / "b", engine=tmp_path / "e", pipeline=tmp_path / "p", labels=tmp_path / "l",
            golden=tmp_path / "g", name="n", version="1", profile="p", facts=facts,
        )  # fmt: skip
