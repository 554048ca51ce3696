"""What the fleet's page tells Prometheus of itself."""

import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fleet_server_fixtures import device_row, wait_until, write_fleet
from prometheus_fixtures import promtool, series_of
from web_fixtures import PASSWORD, Visitor, WebProcess, add_people

from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.store.devices import save_devices

CHANGED = "tandem_fleet_web_last_change_timestamp_seconds"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fleet(tmp_path_factory.mktemp("web") / "fleet", 1)


@pytest.fixture(scope="module")
def prometheus(folder: Path) -> Iterator[Visitor]:
    """Somebody who has a token, as Prometheus has."""
    token = add_people(folder)
    web = WebProcess(folder)
    yield Visitor(web, headers={"authorization": f"Bearer {token}"})
    web.close()


def series(prometheus: Visitor) -> dict[str, float]:
    text = prometheus.get("/metrics").text
    assert promtool("check", "metrics", stdin=text) == ""
    return series_of(text)


def test_the_page_counts_requests_viewers_and_who_was_refused(prometheus: Visitor) -> None:
    person = Visitor(prometheus.web)
    assert person.sign_in("otto", "wrong").status == 401
    assert person.sign_in("otto", PASSWORD).status == 303
    assert person.get("/devices").status == 200
    stream = person.events("/live?page=/devices")
    assert prometheus.get("/api/v1/fleet").status == 200
    samples = series(prometheus)
    for kind, code in (("sign_in", 401), ("sign_in", 303), ("page", 200), ("api", 200)):
        assert samples[f'tandem_fleet_web_requests_total{{kind="{kind}",code="{code}"}}'] == 1
    assert samples["tandem_fleet_web_sign_ins_refused_total"] == 1
    assert samples["tandem_fleet_web_viewers"] == 1
    assert samples["tandem_fleet_web_request_seconds_count"] == 5
    assert 0.0 < samples["tandem_fleet_web_request_seconds_sum"] < 60.0
    assert re.search(r"\d", next(name for name in samples if name.startswith("tandem_build_info")))
    stream.close()
    wait_until(lambda: series(prometheus)["tandem_fleet_web_viewers"] == 0, lambda: "")


def test_paths_of_visitors_make_no_endless_series(prometheus: Visitor) -> None:
    for number in range(20):
        Visitor(prometheus.web).get(f"/x{number}?y={number}")
        Visitor(prometheus.web).get(f"/api/v1/{number}")
    names = [name for name in series(prometheus) if "requests_total" in name]
    assert len(names) < 20
    assert not any("x1" in name or "/" in name for name in names)


def test_the_time_of_the_last_change_is_that_of_the_store(
    prometheus: Visitor, folder: Path
) -> None:
    before = series(prometheus)[CHANGED]
    time.sleep(1.1)
    assert series(prometheus)[CHANGED] == before  # time that passes is no change
    with closing(load_fleet(folder).open_store()) as database, database.write():
        save_devices(database, [device_row("d0")])
    wait_until(lambda: series(prometheus)[CHANGED] > before, lambda: "")
    assert abs(time.time() - series(prometheus)[CHANGED]) < 30.0


@pytest.mark.parametrize("header", ["", "Bearer wrong"])
def test_figures_of_the_page_need_a_token(prometheus: Visitor, header: str) -> None:
    answer = Visitor(prometheus.web).ask("GET", "/metrics", authorization=header)
    assert answer.status == 401
    assert "tandem_" not in answer.text
