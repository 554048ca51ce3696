"""What a device says of itself and of the release that runs, from a board's files and figures."""

from pathlib import Path

import pytest
from mqtt_fixtures import PROFILE

from device.agent.config import AgentConfig, BrokerTable
from device.agent.facts import FACTS_S, Facts, jetpack_of, read_facts
from device.agent.figures import MEASURED_S, TEMPERATURE_S, Figures
from device.agent.health import PipelineHealth
from device.protocol.messages import Ready, Stats
from device.update.slots import SlotRecord, SlotState

FILES = {
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic",
    "proc/device-tree/model": "NVIDIA Jetson Orin NX Engineering Reference Developer Kit\0",
    "proc/meminfo": "MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\n",
    "var/lib/nvpmodel/status": "pmode:0002",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=2 NAME=15W >\n",
    "sys/bus/platform/devices/15880000.nvdla0/uevent": "",
    "sys/bus/platform/devices/158c0000.nvdla1/uevent": "",
}
RECORD = SlotRecord(sha256="a" * 64, bytes=1, name="n", version="1", request="r")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "root"


def config(folder: Path) -> AgentConfig:
    return AgentConfig(
        device="dev1",
        profile=PROFILE,
        state_dir=str(folder),
        broker=BrokerTable(host="127.0.0.1"),
        labels={"site": "lab"},
    )


def test_the_facts_are_read_from_the_board_s_files(root: Path) -> None:
    facts = read_facts(config(root), root)
    assert facts.module == "NVIDIA Jetson Orin NX Engineering Reference Developer Kit"
    assert (facts.jetpack, facts.power_mode, facts.dla_cores) == ("6.2", "15W", 2)
    assert facts.memory_mb == 16384
    assert facts.labels == {"site": "lab"}
    assert facts.free_mb > 0


def test_a_machine_that_is_no_board_has_few_facts(tmp_path: Path) -> None:
    facts = read_facts(config(tmp_path / "gone"), tmp_path)
    assert (facts.module, facts.jetpack, facts.dla_cores, facts.memory_mb) == ("", "", 0, 0)
    assert facts.free_mb == 0
    assert jetpack_of("99.9") == ""


def test_facts_are_read_seldom_and_releases_are_told_at_once(root: Path) -> None:
    facts = Facts(config(root), root)
    state = SlotState(a=RECORD, active="a")
    assert facts.of(SlotState(), 0.0).bundles == ()
    (root / "var/lib/nvpmodel/status").write_text("pmode:0000")
    assert facts.of(state, FACTS_S - 1.0).bundles == (RECORD.sha256,)
    assert facts.of(state, FACTS_S - 1.0).power_mode == "15W"
    assert facts.of(state, FACTS_S).power_mode == "MAXN"


def stats(p95_ms: float) -> Stats:
    return Stats(
        frames=30,
        fps=30.0,
        latency_p50_ms=1.0,
        latency_p99_ms=2.0,
        stage_p50_ms={},
        stage_p99_ms={},
        dropped={},
        recent_p50_ms=5.0,
        recent_p95_ms=p95_ms,
    )


def test_figures_alone_wait_and_a_change_of_phase_tells_them_at_once(tmp_path: Path) -> None:
    zone = tmp_path / "class/thermal/thermal_zone0"
    zone.mkdir(parents=True)
    (zone / "type").write_text("gpu-thermal")
    (zone / "temp").write_text("61500")
    figures = Figures(tmp_path)
    assert figures.measured(None, "idle", PipelineHealth("failed", 0, 0, None, 0.0), 0.0) is None
    figures.on_message(stats(9.0))
    first = figures.measured(RECORD, "trial", PipelineHealth("running", 30, 1, None, 0.0), 0.0)
    assert first is not None
    assert (first.frames, first.errors, first.fps) == (30, 1, 30.0)
    assert (first.latency_p50_ms, first.latency_p95_ms, first.temperature_c) == (5.0, 9.0, 61.5)
    more = PipelineHealth("running", 300, 1, None, 0.0)
    figures.on_message(stats(11.0))
    assert figures.measured(RECORD, "trial", more, MEASURED_S - 0.1) == first
    live = figures.measured(RECORD, "live", more, MEASURED_S - 0.1)
    assert live is not None
    assert (live.frames, live.latency_p95_ms) == (300, 11.0)


def test_a_new_process_begins_without_a_latency(tmp_path: Path) -> None:
    figures = Figures(tmp_path)
    figures.on_message(stats(9.0))
    assert figures.latest(0.0).latency_p95_ms == 9.0
    figures.on_message(Ready(pipeline="p", engine_sha256="0"))
    assert figures.latest(TEMPERATURE_S).latency_p95_ms is None
    assert figures.latest(TEMPERATURE_S).temperature_c is None  # no sensor
