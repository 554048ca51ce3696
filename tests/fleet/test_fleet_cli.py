"""`tandem fleet` on a store: no server is needed to give orders and to look."""

import json
import re
import shlex
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from click.testing import CliRunner
from fleet_server_fixtures import PROFILE, device_row, report, write_fleet
from mqtt_fixtures import make_bundle
from msgspec.structs import replace

from device.errors import ConfigError
from device.protocol.documents import DeviceFacts, Measured
from toolkit.cli.commands.fleet import fleet as fleet_command
from toolkit.errors import RolloutError
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.store.devices import save_devices

ROOT = Path(__file__).parents[2]
FLEET_PAGES = (
    "fleet.md", "fleet_audit.md", "fleet_monitoring.md", "fleet_web.md", "identities.md",
)  # fmt: skip
PAGES = [ROOT / "docs" / name for name in FLEET_PAGES]
CONSOLE = [
    command
    for page in PAGES
    for command in re.findall(r"^\$ tandem fleet (.*)$", page.read_text(), re.MULTILINE)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fleet of four devices that have reported, one of another profile and one away."""
    folder = write_fleet(tmp_path / "fleet", 1883)
    database = load_fleet(folder).open_store()
    measured = Measured(sha256="b" * 64, frames=10, fps=25.0, latency_p95_ms=9.0)
    facts = DeviceFacts(jetpack="6.0", labels={"site": "lab"})
    rows = [
        device_row("board-1", report("b", facts=facts, measured=measured)),
        device_row("board-2", report()),
        replace(device_row("board-3"), state=None),
        device_row("nano", report(profile="orin-nano")),
    ]
    with database.write():
        save_devices(database, rows)
    database.close()
    return folder


def run(folder: Path, *words: str) -> str:
    done = CliRunner().invoke(
        fleet_command, words, env={"TANDEM_FLEET": str(folder), "COLUMNS": "200"},
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_dry_run_says_all_and_starts_nothing(folder: Path, tmp_path: Path) -> None:
    bundle = str(make_bundle(tmp_path / "in"))
    run(folder, "device", "label", "board-2", "group=canary")
    words = ("rollout", "start", "--bundle", bundle, "--groups", "canary,rest", "--dry-run")
    text = run(folder, *words)
    assert f"it is orin-nano, the release is for {PROFILE}" in text
    assert "1 devices are not online" in text
    assert "3 devices take unsigned releases (dev = true)" in text
    assert "3 devices run no release of this fleet" in text
    assert "Nothing was sent" in text
    plan = json.loads(run(folder, *words, "--json"))
    assert plan["rollout"] is None
    assert plan["plan"]["groups"][0]["devices"] == ["board-2"]
    assert run(folder, "rollout", "status", "--json") == "[]\n"


def test_orders_wait_in_the_store_and_lists_say_so(folder: Path, tmp_path: Path) -> None:
    bundle = str(make_bundle(tmp_path / "in"))
    assert "rollout 1 has begun" in run(folder, "rollout", "start", "--bundle", bundle)
    assert "No server runs: orders wait" in run(folder, "rollout", "status", "1")
    run(folder, "rollout", "pause", "1")
    view = json.loads(run(folder, "rollout", "status", "1", "--json"))
    assert (view["status"], view["server"]) == ("paused", False)
    assert view["reason"].startswith("paused by ")
    assert view["groups"] == [
        {"name": "rest", "devices": 3, "phases": {"pending": 3}, "shadow_agreement": None,
         "shadow_frames": 0}
    ]  # fmt: skip
    run(folder, "rollout", "resume", "1")
    with pytest.raises(RolloutError, match="rollout 1 is running: approve means nothing to it now"):
        run(folder, "rollout", "approve", "1")
    run(folder, "rollout", "abort", "1")
    watched = run(folder, "rollout", "status", "1", "--watch", "--json")  # it has ended
    assert json.loads(watched)["status"] == "aborted"
    table = run(folder, "rollout", "status")
    assert "aborted" in table
    assert "good 1" in table
    with pytest.raises(RolloutError, match="there is no rollout 2: the last one is 1"):
        run(folder, "rollout", "pause", "2")
    history = run(folder, "logs", "board-1")
    assert "rollout 1  is in this rollout" in history
    assert json.loads(run(folder, "audit", "verify", "--json"))["rows"] == 4


def test_rollback_without_a_number_is_of_the_newest_rollout(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="there is no rollout yet"):
        run(folder, "rollback")
    for version in ("1", "2"):
        bundle = make_bundle(tmp_path / "in", version=version)
        run(folder, "rollout", "start", "--bundle", str(bundle))
    assert run(folder, "rollback") == "rollout 2 is told to roll back\n"


def test_devices_are_filtered(folder: Path) -> None:
    def ids(*words: str) -> list[str]:
        return [row["id"] for row in json.loads(run(folder, "devices", *words, "--json"))]

    assert ids() == ["board-1", "board-2", "board-3", "nano"]
    assert ids("--where", "label.site=lab,jetpack>=6") == ["board-1"]
    assert ids("--state", "unknown") == ["board-3"]
    assert ids("--where", "profile=orin-nano", "--state", "online") == ["nano"]
    assert ids("--phase", "live") == []
    text = run(folder, "devices")
    assert "board-1 dev" in text
    assert "4 devices" in text


def test_a_list_is_a_page_and_says_how_to_go_on(folder: Path) -> None:
    text = run(folder, "devices", "--limit", "2")
    assert "board-2" in text
    assert "board-3" not in text
    assert "4 devices: 3 online, 1 unknown" in text
    place = re.search(r"2 are listed; the next ones: --after (\S+)", text)
    assert place is not None
    rest = json.loads(run(folder, "devices", "--after", place[1], "--json"))
    assert [row["id"] for row in rest] == ["board-3", "nano"]
    assert "--after" not in run(folder, "devices", "--after", place[1])
    (row,) = json.loads(run(folder, "devices", "--search", "NAN", "--json"))
    assert row["id"] == "nano"
    with pytest.raises(RolloutError, match="'x' is no place in a list of devices"):
        run(folder, "devices", "--after", "x")


def test_queries_are_saved_and_used(folder: Path, tmp_path: Path) -> None:
    assert run(folder, "query", "list") == "No query is saved.\n"
    run(folder, "query", "set", "lab", "label.site=lab")
    assert run(folder, "query", "list") == "lab  label.site=lab\n"
    rows = json.loads(run(folder, "devices", "--where", "@lab", "--json"))
    assert [row["id"] for row in rows] == ["board-1"]
    bundle = str(make_bundle(tmp_path / "in"))
    words = ("rollout", "start", "--bundle", bundle, "--groups", "@lab,rest", "--dry-run", "--json")
    plan = json.loads(run(folder, *words))["plan"]
    assert plan["groups"][0] == {"name": "@lab", "devices": ["board-1"]}
    run(folder, "query", "set", "lab", "")
    with pytest.raises(RolloutError, match="there is no saved query 'lab'"):
        run(folder, *words)


def test_a_rollout_that_begins_later_says_so(folder: Path, tmp_path: Path) -> None:
    bundle = str(make_bundle(tmp_path / "in"))
    words = ("rollout", "start", "--bundle", bundle, "--soak", "30m", "--window", "22:00-04:00")
    with pytest.raises(RolloutError, match="a rollout begins later than now"):
        run(folder, *words, "--start-at", "2020-01-01T00:00")
    with pytest.raises(RolloutError, match="'half' is no time to wait"):
        run(folder, "rollout", "start", "--bundle", bundle, "--soak", "half")
    start = (datetime.now(timezone.utc) + timedelta(days=3)).strftime("%Y-%m-%dT%H:%M:%SZ")
    run(folder, *words, "--start-at", start)
    view = json.loads(run(folder, "rollout", "status", "1", "--json"))
    assert (view["start"], view["window"]) == (start, "22:00-04:00")
    text = run(folder, "rollout", "status", "1")
    assert "devices install it in their maintenance window, 22:00-04:00" in text


def test_older_rows_of_the_log_go_to_a_file(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "log.jsonl"
    run(folder, "device", "label", "board-1", "a=b")
    assert run(folder, "audit", "archive", str(archive)) == "No row is that old.\n"
    assert not archive.exists()
    text = run(folder, "audit", "verify")
    assert "The audit log holds: chain verified to row 1, whose hash is " in text


def test_a_decommissioned_device_is_not_listed(folder: Path) -> None:
    run(folder, "device", "decommission", "nano")
    assert "nano" not in run(folder, "devices")
    with pytest.raises(RolloutError, match="no device 'nano'"):
        run(folder, "device", "show", "nano")


def test_a_device_is_shown_with_what_it_measured(folder: Path) -> None:
    run(folder, "device", "label", "board-1", "group=canary")
    text = run(folder, "device", "show", "board-1")
    for words in ("takes unsigned releases", "p95 9 ms", "group=canary, site=lab", "app-b 1"):
        assert words in text
    assert json.loads(run(folder, "device", "show", "board-1", "--json"))["measured"]["fps"] == 25
    with pytest.raises(RolloutError, match="the fleet has no device 'board-9'; it has board-1"):
        run(folder, "device", "show", "board-9")
    with pytest.raises(RolloutError, match="no device 'board-9'"):
        run(folder, "logs", "board-9")
    with pytest.raises(RolloutError, match=r"no device '\+'"):  # in a topic: all devices
        run(folder, "device", "clear", "+")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--groups", "beta,rest"), "`tandem fleet device label ID group=beta`"),
        (("--gate", "speed>1"), "there is no figure 'speed'"),
        (("--require", "jetpack>=7"), "fits none of 4 devices"),
        (("--rate", "fast"), "'fast' is no rate"),
        (("--success", "2"), "'2' is no share"),
        (("--max-failures", "x"), "'x' is no limit of failures"),
        (("--window", "night"), "'night' is no maintenance window"),
    ],
)
def test_a_rollout_that_makes_no_sense_is_not_begun(
    folder: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    bundle = str(make_bundle(tmp_path / "in"))
    with pytest.raises(RolloutError) as error:
        run(folder, "rollout", "start", "--bundle", bundle, *words)
    assert message in str(error.value)
    assert run(folder, "rollout", "status", "--json") == "[]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "`tandem fleet init` makes a fleet's folder"),
        ("name = 'x y'\n", "name"),
        ("name = 'x'\nbrokers = 1\n[broker]\nhost = 'h'\n", "brokers"),
    ],
)
def test_a_folder_that_is_no_fleet_is_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "fleet.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, "devices")


@pytest.mark.parametrize("line", CONSOLE)
def test_the_commands_that_the_page_shows_have_these_options(line: str, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "in")
    words = shlex.split(line.replace("robot.bundle", str(bundle)))
    assert "Usage" in run(tmp_path, *words, "--help")
