"""What of a fleet ends is said 30 and 7 days before: by a command, its exit status, the server."""

import json
import logging
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from mqtt_fixtures import free_port

from toolkit.cli.main import tandem
from toolkit.fleet.authority import Authority
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.folder import make_fleet
from toolkit.fleet.server import expiry
from toolkit.fleet.server.expiry import (
    RULES,
    ExpiringItem,
    most_urgent,
    read_expiry,
    sentence,
    urgency,
)
from toolkit.fleet.server.refresher import Refresher
from toolkit.fleet.trust import certificates, repository

NOW = expiry.utc_now()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "fleet"
    make_fleet(folder, name="f", broker=f"127.0.0.1:{free_port()}")
    certificates.issue_device(Authority(folder / "identity"), "board-1", folder.parent / "out")
    return folder


def ends_in(kind: str, days: float) -> ExpiringItem:
    return ExpiringItem(kind, kind, NOW + timedelta(days=days))


@pytest.mark.parametrize("kind", RULES)
def test_each_kind_is_soon_then_urgent_then_over(kind: str) -> None:
    rule = RULES[kind]
    moment = 1 / 86400
    for days, expected in (
        (rule.soon_days + moment, "fine"), (rule.soon_days, "soon"),
        (rule.urgent_days + moment, "soon"), (rule.urgent_days, "urgent"),
        (moment, "urgent"), (0, "over"), (-1, "over"),
    ):  # fmt: skip
        assert urgency(ends_in(kind, days), NOW) == expected, days


def test_what_a_server_renews_is_fine_until_it_has_not() -> None:
    """Else an operator would learn to ignore the warnings."""
    for role in ("timestamp", "snapshot"):
        life_days = repository.LIFETIME_DAYS[role]
        assert urgency(ends_in(role, life_days / 2), NOW) == "fine"
        assert urgency(ends_in(role, life_days / 2 - 2), NOW) == "soon"
    assert RULES["certificate"].soon_days < certificates.RENEW_DAYS
    assert RULES["revocation list"].soon_days < certificates.RENEW_DAYS


def test_the_most_urgent_of_all_counts() -> None:
    assert most_urgent((), NOW) == "fine"
    rows = [ends_in("root", 400), ends_in("device", 20)]
    assert most_urgent(rows, NOW) == "soon"
    assert most_urgent([*rows, ends_in("targets", -1)], NOW) == "over"


def test_all_that_ends_is_listed_with_what_to_do(fleet: Path) -> None:
    rows = read_expiry(fleet)
    assert {row.kind for row in rows} == set(RULES)
    assert [row.ends for row in rows] == sorted(row.ends for row in rows)
    (device,) = [row for row in rows if row.kind == "device"]
    message = sentence(device, device.ends - timedelta(days=5))
    assert message.startswith("the device board-1 ends in 5 days, on ")
    assert "tandem fleet identity expect board-1" in message
    assert "ended on" in sentence(device, device.ends + timedelta(days=1))
    (bench := fleet.parent / "bench").mkdir(exist_ok=True)
    assert read_expiry(bench) == ()


def status(fleet: Path, *words: str) -> Result:
    command = ["fleet", "status", "--fleet", str(fleet), *words]
    return CliRunner().invoke(tandem, command, catch_exceptions=False, env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("days", "exit_code", "state"),
    [(31, 0, "fine"), (30, 3, "soon"), (7, 4, "urgent"), (-1, 4, "over")],
)
def test_a_timer_learns_it_by_the_exit_status(
    fleet: Path, monkeypatch: pytest.MonkeyPatch, days: int, exit_code: int, state: str
) -> None:
    monkeypatch.setattr(expiry, "utc_now", lambda: NOW)
    monkeypatch.setattr(expiry, "read_expiry", lambda _folder: (ends_in("root", days),))
    checked = status(fleet, "--check", "--due")
    assert checked.exit_code == exit_code, checked.output
    assert ("tandem fleet keys rotate root" in checked.output) == (state != "fine")
    assert bool(checked.output) == (state != "fine")
    (row,) = json.loads(status(fleet, "--json").output)
    assert (row["name"], row["urgency"]) == ("root", state)
    assert status(fleet).exit_code == 0


def test_devices_that_are_fine_are_not_listed(fleet: Path) -> None:
    shown = status(fleet).output
    assert "board-1" not in shown
    assert "timestamp" in shown


def test_the_server_says_once_a_day_what_a_person_has_to_renew(
    fleet: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = next(row.ends for row in read_expiry(fleet) if row.kind == "root")
    monkeypatch.setattr(expiry, "utc_now", lambda: root - timedelta(days=6))
    refresher = Refresher(load_fleet(fleet))
    with caplog.at_level(logging.WARNING, "tandem.fleet"):
        refresher._warn()
        refresher._warn()
    messages = [record.getMessage() for record in caplog.records]
    assert len([line for line in messages if line.startswith("the root ends in 6 days")]) == 1
