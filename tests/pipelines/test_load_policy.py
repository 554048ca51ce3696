"""Steps that a hot or slow board makes a pipeline take, and its way back."""

import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import cv2
import msgspec
import pytest
from video_fixtures import LABELS, ColourDetector, colour_pipeline, scene

from device.board_files import hottest_c
from device.errors import ConfigError
from device.protocol.messages import ChildMessage, Heartbeat, Stats
from pipelines.config import load_pipeline
from pipelines.load_config import LoadConfig, LoadStep
from pipelines.runtime.batch import Model
from pipelines.runtime.load import Load, Readings, load_text, next_load
from pipelines.runtime.load_control import LoadControl, gpu_clock
from pipelines.runtime.pipeline import RunOptions, run_pipeline
from pipelines.sinks.table import FrameResult

HALF, QUARTER = LoadStep(every_nth=2), LoadStep(every_nth=4)
HEAT = LoadConfig(
    hot_c=80.0, cool_by_c=10.0, hold_s=3.0, settle_s=6.0, recover_s=10.0, steps=(HALF, QUARTER)
)


def steps_over(config: LoadConfig, readings: Sequence[Readings]) -> list[int]:
    """The step after each reading, one a second."""
    load, steps = Load(), []
    for second, reading in enumerate(readings):
        load = next_load(config, load, reading, float(second))
        steps.append(load.step)
    return steps


def heat(*temperatures: float) -> list[Readings]:
    return [Readings(temperature_c=value) for value in temperatures]


def test_a_step_is_taken_after_the_limit_was_passed_for_hold_s() -> None:
    assert steps_over(HEAT, heat(81, 81, 81, 81)) == [0, 0, 0, 1]
    assert steps_over(HEAT, heat(80, 80, 80, 80, 80)) == [0] * 5  # at the limit


def test_one_good_reading_starts_the_wait_again() -> None:
    assert steps_over(HEAT, heat(81, 81, 79, 81, 81, 81, 81)) == [0, 0, 0, 0, 0, 0, 1]


def test_heat_that_lasts_takes_step_after_step_and_then_no_more() -> None:
    assert steps_over(HEAT, heat(*[90] * 16)) == [0] * 3 + [1] * 6 + [2] * 7


def test_a_step_is_taken_back_once_it_was_cool_for_recover_s() -> None:
    warm = heat(*[90] * 4, *[70] * 10)
    assert steps_over(HEAT, [*warm, *heat(70)])[-2:] == [1, 0]
    almost = heat(*[90] * 4, *[70.1] * 40)  # between the limits: it stays as it is
    assert steps_over(HEAT, almost)[-1] == 1


def test_the_way_back_is_one_step_at_a_time() -> None:
    steps = steps_over(HEAT, heat(*[90] * 10, *[60] * 30))
    assert steps[9] == 2
    assert steps.index(1, 9) == 20
    assert steps.index(0, 9) == 30


def test_a_board_that_heats_up_under_load_settles_and_does_not_swing() -> None:
    """A first-order board: 60 s time constant, 95 C at all frames, less with fewer frames."""
    config = msgspec.structs.replace(HEAT, settle_s=30.0)
    load, temperature_c, steps = Load(), 45.0, []
    for second in range(3600):
        share = 1.0 if not load.step else 1.0 / config.steps[load.step - 1].every_nth
        target_c = 40.0 + 55.0 * share
        temperature_c += (target_c - temperature_c) / 60.0
        load = next_load(config, load, Readings(temperature_c=temperature_c), float(second))
        steps.append(load.step)
        assert temperature_c < 84.0
    changes = sum(a != b for a, b in pairwise(steps))
    assert changes <= 60  # a cycle of heating up and cooling down takes over 120 s
    assert max(steps) == 1


@pytest.mark.parametrize(
    ("config", "good", "bad", "says"),
    [
        (
            LoadConfig(slow_ms=50.0, hold_s=0.0, steps=(HALF,)),
            Readings(latency_p95_ms=50.0),
            Readings(latency_p95_ms=50.1),
            "a p95 of 50.1 ms is above slow_ms = 50",
        ),
        (
            LoadConfig(low_clock=0.5, hold_s=0.0, steps=(HALF,)),
            Readings(clock=0.5),
            Readings(clock=0.49),
            "a GPU clock of 49% is below low_clock = 50%",
        ),
        (
            LoadConfig(hot_c=80.0, hold_s=0.0, steps=(HALF,)),
            Readings(),  # no sensor, nothing to judge
            Readings(temperature_c=80.5),
            "80.5 C is above hot_c = 80",
        ),
    ],
    ids=["latency", "clock", "temperature"],
)
def test_each_limit_holds_at_its_value_and_is_named_beyond(
    config: LoadConfig, good: Readings, bad: Readings, says: str
) -> None:
    assert next_load(config, Load(), good, 0.0).step == 0
    load = next_load(config, Load(), bad, 0.0)
    assert load_text(config, load) == f"step 1 of 1 (one frame of 2): {says}"


def test_what_a_step_asks_for_is_said() -> None:
    config = LoadConfig(hot_c=80.0, steps=(LoadStep(every_nth=3, max_hz=5.0),))
    text = load_text(config, Load(1, "hot"))
    assert text == "step 1 of 1 (one frame of 3, at most 5 frames/s a camera): hot"


# --- sensors


def board(root: Path, zones: dict[str, str], clocks: dict[str, tuple[str, str]]) -> Path:
    """A /sys with thermal zones by type and devfreq devices by name."""
    for number, (kind, text) in enumerate(zones.items()):
        folder = root / "class/thermal" / f"thermal_zone{number}"
        folder.mkdir(parents=True)
        (folder / "type").write_text(kind + "\n")
        (folder / "temp").write_text(text)
    for name, (current, highest) in clocks.items():
        folder = root / "class/devfreq" / name
        folder.mkdir(parents=True)
        (folder / "cur_freq").write_text(current)
        (folder / "max_freq").write_text(highest)
    return root


def test_the_hottest_real_zone_counts(tmp_path: Path) -> None:
    zones = {
        "cpu-thermal": "51500\n",
        "gpu-thermal": "63250\n",
        "PMIC-Die": "100000\n",
        "cv0-thermal": "-256000\n",  # powered down
        "tj-thermal": "",
    }
    assert hottest_c(board(tmp_path, zones, {})) == 63.25
    assert hottest_c(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    "name", ["17000000.ga10b", "17000000.gv11b", "17000000.gpu", "gpu", "gpu-gpc-0"]
)
def test_the_clock_of_the_gpu_is_a_fraction(tmp_path: Path, name: str) -> None:
    others = {"bwmgr": ("4266000000\n", "4266000000\n"), "gpu-nvd-0": ("1\n", "1\n")}
    root = board(tmp_path, {}, {name: ("306000000\n", "1224000000\n"), **others})
    assert gpu_clock(root) == 0.25
    assert gpu_clock(tmp_path / "nothing") is None


# --- in a pipeline


def test_a_hot_board_gets_fewer_frames_and_the_heartbeat_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.runtime.load_control.PERIOD_S", 0.05)
    root = board(tmp_path / "sys", {"tj-thermal": "91000\n"}, {})
    temperature = root / "class/thermal/thermal_zone0/temp"
    (tmp_path / "in").mkdir()
    for i in range(8):
        cv2.imwrite(str(tmp_path / "in" / f"{i}.png"), scene(i, 3))
    config = msgspec.structs.replace(
        colour_pipeline(f"images://{tmp_path}/in?fps=100", loop=True),
        load=LoadConfig(hot_c=80.0, hold_s=0.0, recover_s=0.0, steps=(LoadStep(every_nth=5),)),
    )
    monkeypatch.setattr(
        "pipelines.runtime.pipeline.LoadControl", lambda load, use: LoadControl(load, root, use)
    )
    messages: list[ChildMessage] = []
    numbers: list[int] = []
    stop = threading.Event()

    def watch(result: FrameResult) -> None:
        numbers.append(result.frame.seq)
        texts = [m.load for m in messages if isinstance(m, Heartbeat)]
        if len(numbers) > 40 and texts[-1]:
            temperature.write_text("45000\n")
        if len(numbers) > 60 and not texts[-1]:
            stop.set()

    run_pipeline(
        config,
        Model(ColourDetector(), LABELS, ""),
        RunOptions(emit=messages.append, stop=stop),
        watch=watch,
    )
    gaps = [b - a for a, b in pairwise(numbers)]
    assert gaps.count(5) > 10  # while it was hot
    assert gaps[-1] == 1  # and all frames again
    loads = {m.load for m in messages if isinstance(m, Heartbeat)}
    assert loads == {"", "step 1 of 1 (one frame of 5): 91.0 C is above hot_c = 80"}
    figures = [m for m in messages if isinstance(m, Stats)]
    assert figures[-1].dropped["load"] > 40


TOML = """
name = "x"
[source]
uri = "a.mp4"
[preprocess]
width = 64
height = 64
[decode]
kind = "ltrb_grid"
boxes = "b"
scores = "s"
strides = [8]
[load]
{load}
"""


@pytest.mark.parametrize(
    ("load", "says"),
    [
        ("steps = [{every_nth = 2}]", "set hot_c, slow_ms or low_clock"),
        ("hot_c = 80\nsteps = [{}]", "each of `steps` needs every_nth above 1, max_hz or use"),
        ("hot_c = 80\nsteps = []", "load.steps is wrong"),
        ("hot_c = 80\nsteps = [{every_nth = 0}]", r"load.steps\[0\].every_nth is wrong"),
    ],
)
def test_limits_that_could_do_nothing_are_refused(tmp_path: Path, load: str, says: str) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(TOML.format(load=load))
    with pytest.raises(ConfigError, match=says):
        load_pipeline(path)


def test_limits_without_a_sensor_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    monkeypatch.setattr("pipelines.runtime.load_control.time.monotonic", lambda: now_s)
    config = LoadConfig(hot_c=80.0, low_clock=0.5, steps=(HALF,))
    control = LoadControl(config, tmp_path)
    for _ in range(2):
        now_s += 2.0
        control.tick()
    says = "[load] has {}, and this machine shows no {}: no step is taken for it"
    assert caplog.messages == [
        says.format("hot_c = 80", "thermal zone"),
        says.format("low_clock = 0.5", "clock of a GPU"),
    ]


@pytest.mark.parametrize(("slow_at_s", "is_over"), [(100.0, True), (99.9, False)])
def test_the_p95_is_that_of_the_last_seconds(
    monkeypatch: pytest.MonkeyPatch, slow_at_s: float, is_over: bool
) -> None:
    now_s = 0.0
    monkeypatch.setattr("pipelines.runtime.load_control.time.monotonic", lambda: now_s)
    config = LoadConfig(slow_ms=50.0, window_s=4.0, hold_s=0.0, steps=(HALF,))
    control = LoadControl(config, Path("/nonexistent"))
    now_s = slow_at_s
    for _ in range(300):  # many more than the fast ones
        control.frame_done(100.0)
    now_s = 104.0
    control.frame_done(10.0)
    control.tick()
    assert bool(control.text) == is_over
