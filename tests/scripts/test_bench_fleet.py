"""The benchmark of fleets runs, with few devices, on a real broker and server."""

import json
import re

import pytest
from postgresql_fixtures import postgresql

from scripts import bench_fleet


@pytest.mark.parametrize("name", ["reported", "rollout", "download", "reconnect", "signed"])
def test_a_row_measures_light_devices(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = [row for row in bench_fleet.ROWS if row.name == name]
    bench_fleet.main(["--row", name, "--scale", str(4 / row.devices), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (result["name"], result["devices"]) == (name, 4)
    assert result["ours_s"] > 0.0
    assert "broker" in result["note"]


@pytest.mark.slow
def test_a_rollout_goes_on_when_one_of_two_servers_is_killed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with postgresql() as url:
        bench_fleet.main(["--row", "shared", "--store", url, "--scale", "0.004", "--json"])
    note = json.loads(capsys.readouterr().out)["note"]
    assert "each device ordered once" in note
    rates = (
        r"until the kill (\d+) a second, .*; its lease taken after [\d.]+ s; then (\d+) a second"
    )
    assert re.search(rates, note)


@pytest.mark.parametrize("store", ["", "sqlite:///fleet.db"])
def test_two_servers_without_postgresql_are_refused_at_once(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_fleet, "measure", lambda *_: pytest.fail("it was begun"))
    with pytest.raises(SystemExit):
        bench_fleet.main(["--row", "shared", "--store", store])
    assert "--store postgresql://user@host/empty" in capsys.readouterr().err


def test_lengths_of_packets_are_those_of_mqtt() -> None:
    """The examples of MQTT 3.1.1, table 2.4."""
    from scripts.light_devices import _length

    lengths = {0: "00", 127: "7f", 128: "8001", 16383: "ff7f", 16384: "808001", 2097151: "ffff7f"}
    assert {count: _length(count).hex() for count in lengths} == lengths
