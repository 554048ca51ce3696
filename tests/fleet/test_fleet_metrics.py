"""The figures of a fleet for Prometheus, its dashboard and its alerts, judged by promtool."""

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fleet_server_fixtures import device_row, report, wait_until, write_fleet
from prometheus_fixtures import promtool, series_of
from store_fixtures import answer, fleet, served, spec_of

import configs
from device.protocol.documents import StateDocument, encode
from device.protocol.mqtt import LinkUp, Message
from device.protocol.topics import SERVER_CLAIM, Topics
from pipelines.metrics import render
from toolkit.errors import RolloutError
from toolkit.fleet.brokers.local import free_port
from toolkit.fleet.fleet_folder import Fleet, load_fleet
from toolkit.fleet.server import metrics
from toolkit.fleet.server.metrics import Meters, MetricsListener, ServerFigures, parse_listen
from toolkit.fleet.server.operations import make_plan, order, start_rollout
from toolkit.fleet.server.serve import FleetServer
from toolkit.fleet.store import lease
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.devices import save_devices
from toolkit.fleet.web.meters import Meters as WebMeters

MONITORING = Path(configs.__file__).parent / "monitoring"
ALERTS = MONITORING / "fleet_alerts.yaml"
DASHBOARD = MONITORING / "fleet_dashboard.json"


@pytest.fixture
def fleet_folder(tmp_path: Path) -> Fleet:
    return load_fleet(write_fleet(tmp_path, 1883))


@pytest.fixture
def store(fleet_folder: Fleet) -> Iterator[Database]:
    with closing(fleet_folder.open_store()) as database:
        yield database


@pytest.fixture
def meters() -> Meters:
    return Meters()


@pytest.fixture
def listener(fleet_folder: Fleet, meters: Meters) -> Iterator[MetricsListener]:
    figures = ServerFigures(fleet_folder, meters)
    listener = MetricsListener(figures.read, ("127.0.0.1", 0))
    listener.start()
    yield listener
    listener.close()


def scrape(listener: MetricsListener, host: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{listener.port}/metrics")
    if host:
        request.add_header("Host", host)
    with urllib.request.urlopen(request, timeout=10.0) as response:
        return str(response.read().decode())


def fill(store: Database) -> None:
    """A fleet with devices of all kinds, an ended rollout, and one that is paused."""
    with store.write():
        save_devices(store, fleet())
    control = served(store)
    for letter in "ab":
        spec = spec_of(letter, groups=("d0", "rest"))
        number = start_rollout(store, spec, make_plan(store, spec), Path("/new"), "ana")
        control.advance({})
        if letter == "a":
            answer(control, number, letter, "d0", "d1", "d2")
    order(store, 2, "pause", "ana")
    control.advance({})


def test_what_prometheus_reads_is_the_fleet(
    store: Database, listener: MetricsListener, meters: Meters
) -> None:
    fill(store)
    meters.count("beat")
    meters.delay.observe(0.02, times=3)
    meters.delay.observe(99.0)
    text = scrape(listener)
    assert promtool("check", "metrics", stdin=text) == ""
    series = series_of(text)
    states = {name: n for name, n in series.items() if name.startswith("tandem_fleet_devices{")}
    assert sum(states.values()) == 123
    assert 'tandem_fleet_devices{state="late"}' in states
    assert series['tandem_fleet_rollouts{status="paused"}'] == 1
    assert series['tandem_fleet_events_total{kind="beat"}'] == 1
    assert series["tandem_fleet_lease_holder"] == 0
    assert series['tandem_fleet_event_delay_seconds_bucket{le="0.03"}'] == 3
    assert series['tandem_fleet_event_delay_seconds_bucket{le="+Inf"}'] == 4
    assert series["tandem_fleet_event_delay_seconds_sum"] == pytest.approx(99.06)
    of_rollouts = [name for name in series if name.startswith("tandem_fleet_rollout_devices")]
    assert of_rollouts
    assert all('rollout="2"' in name or 'rollout="1"' in name for name in of_rollouts)


def test_a_hostile_fleet_makes_no_endless_series(
    store: Database, listener: MetricsListener
) -> None:
    rows = [
        device_row(f"d{n}", report("a", profile=f'p"{n}\n\\'))
        for n in range(metrics.MAX_SERIES + 9)
    ]
    with store.write():
        save_devices(store, rows)
    text = scrape(listener)
    assert promtool("check", "metrics", stdin=text) == ""
    running = {name: n for name, n in series_of(text).items() if "running_devices" in name}
    assert len(running) == metrics.MAX_SERIES + 1
    second = 'tandem_fleet_running_devices{release="other",version="other",profile="other"}'
    assert running[second] == 9


def test_figures_are_for_this_machine_and_outlive_the_store(
    store: Database, fleet_folder: Fleet, listener: MetricsListener, meters: Meters
) -> None:
    with pytest.raises(urllib.error.HTTPError, match="421"):
        scrape(listener, host="evil.example")
    with pytest.raises(RolloutError, match="cannot listen for metrics on"):
        MetricsListener(ServerFigures(fleet_folder, meters).read, ("127.0.0.1", listener.port))
    with store.write():
        store.run("UPDATE settings SET value = 99 WHERE name = 'schema'")
    series = series_of(scrape(listener))
    assert series["tandem_fleet_lease_holder"] == 0
    assert not any("fleet_devices" in name for name in series)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("[::1]:1", ("::1", 1)),
        ("x", None),
        ("h:70000", None),
        ("http://h:1", None),
    ],
)
def test_an_address_is_a_port_with_or_without_a_host(
    text: str, address: tuple[str, int] | None
) -> None:
    if address is None:
        with pytest.raises(RolloutError, match="write PORT or HOST:PORT"):
            parse_listen(text)
    else:
        assert parse_listen(text) == address


# -- what Grafana and Prometheus get

# The series of a scrape, as they were recorded over ten minutes: name -> values a minute.
RECORDED = {
    'tandem_fleet_devices{state="online"}': "90x10",
    'tandem_fleet_devices{state="late"}': "2x10",
    'tandem_fleet_devices{state="silent"}': "8x10",
    'tandem_fleet_problems{kind="hot"}': "3x15",
    'tandem_fleet_problems{kind="fallback"}': "1x15",
    'tandem_fleet_problems{kind="pipeline"}': "0x15",
    'tandem_fleet_running_devices{release="app",version="1",profile="p1"}': "60x10",
    'tandem_fleet_running_devices{release="app",version="1",profile="p2"}': "40x10",
    'tandem_fleet_rollouts{status="paused"}': "1x10",
    'tandem_fleet_rollouts{status="running"}': "0x10",
    'tandem_fleet_rollout_devices{rollout="2",group="canary",phase="live"}': "5x10",
    'tandem_fleet_rollout_devices{rollout="2",group="rest",phase="live"}': "7x10",
    'tandem_fleet_lease_holder{instance="a"}': "0x10",
    'tandem_fleet_lease_holder{instance="b"}': "0x10",
    'tandem_fleet_events_total{kind="beat"}': "0+60x10",
    'tandem_fleet_web_requests_total{kind="page",code="200"}': "0+30x10",
    'tandem_fleet_web_viewers{instance="a"}': "3x10",
    'tandem_fleet_web_viewers{instance="b"}': "4x10",
    **{
        f'tandem_fleet_{name}_seconds_bucket{{le="{bound}"}}': f"0+{count}x10"
        for name in ("event_delay", "store", "web_request")
        for bound, count in (("0.1", 0), ("0.3", 60), ("+Inf", 60))
    },
}
# Expression of the dashboard -> its value after ten minutes, by labels.
VALUES = {
    'sum(tandem_fleet_devices{state=~"online|late"})': {"{}": 92},
    'sum(tandem_fleet_devices{state="silent"})': {"{}": 8},
    "sum(tandem_fleet_devices)": {"{}": 100},
    "tandem_fleet_rollouts > 0": {'tandem_fleet_rollouts{status="paused"}': 1},
    "tandem_fleet_devices": {
        f'tandem_fleet_devices{{state="{state}"}}': count
        for state, count in (("online", 90), ("late", 2), ("silent", 8))
    },
    "tandem_fleet_problems": {
        f'tandem_fleet_problems{{kind="{kind}"}}': count
        for kind, count in (("hot", 3), ("fallback", 1), ("pipeline", 0))
    },
    "sum by (release, version) (tandem_fleet_running_devices)": {
        '{release="app", version="1"}': 100
    },
    "sum by (rollout, phase) (tandem_fleet_rollout_devices)": {'{rollout="2", phase="live"}': 12},
    "sum by (kind) (rate(tandem_fleet_events_total[5m]))": {'{kind="beat"}': 1},
    "sum by (kind, code) (rate(tandem_fleet_web_requests_total[5m]))": {
        '{kind="page", code="200"}': 0.5
    },
    "sum(tandem_fleet_web_viewers)": {"{}": 7},
    **{
        f"histogram_quantile(0.95, sum by (le) (rate(tandem_fleet_{name}_seconds_bucket[5m])))": {
            "{}": 0.29
        }
        for name in ("event_delay", "store", "web_request")
    },
}
FIRING = {
    "TandemDevicesSilent": ("warning", "8 devices are silent: see `tandem fleet status`"),
    "TandemManyDevicesSilent": ("critical", "8% of the fleet is silent"),
    "TandemRolloutPaused": ("warning", "1 rollouts are paused: see `tandem fleet rollout status`"),
    "TandemDevicesHot": ("warning", "3 devices are at 85 C or more"),
    "TandemSegmentOffItsProcessor": (
        "warning",
        "on 1 devices a segment does not run where it was planned, such as a DLA segment on the "
        "GPU or the CPU",
    ),
    "TandemNoServer": ("critical", "no server of the fleet is at work"),
}
ALERT_LABELS = {
    "TandemDevicesSilent": {"state": "silent"},
    "TandemRolloutPaused": {"status": "paused"},
    "TandemDevicesHot": {"kind": "hot"},
    "TandemSegmentOffItsProcessor": {"kind": "fallback"},
}


def expressions() -> list[str]:
    document = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in document["panels"] for target in panel["targets"]]


def test_grafana_knows_all_that_the_dashboard_says() -> None:
    """Its own types read the dashboard, and what they do not know would be lost."""
    pytest.importorskip("grafana_foundation_sdk", reason="needs Python 3.11")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    document = json.loads(DASHBOARD.read_text())
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(document)))
    assert lost(document, known) == []
    document["panels"][0]["fieldConfig"]["defaults"]["unitt"] = "s"
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(document)))
    assert lost(document, known) == ["/panels/0/fieldConfig/defaults/unitt"]


def lost(document: object, known: object, path: str = "") -> list[str]:
    """The places where a document says what another one does not."""
    if isinstance(document, dict) and isinstance(known, dict):
        return [
            place
            for key in document
            for place in lost(document[key], known.get(key), f"{path}/{key}")
        ]
    if isinstance(document, list) and isinstance(known, list) and len(document) == len(known):
        return [
            place
            for number, pair in enumerate(zip(document, known, strict=True))
            for place in lost(*pair, f"{path}/{number}")
        ]
    return [] if document == known else [path]


def test_panels_have_ids_places_and_the_one_datasource() -> None:
    document = json.loads(DASHBOARD.read_text())
    assert document["schemaVersion"] == 39  # Grafana 10.4 and later bring it up to date
    (variable,) = document["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    panels = document["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    source = {"type": "prometheus", "uid": f"${{{variable['name']}}}"}
    assert all(panel["datasource"] == source for panel in panels)
    places = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(places) == len(set(places))  # none covers another
    assert max(x for x, _ in places) < 24  # the grid's columns


def names_in(texts: object) -> set[str]:
    return set(re.findall(r"tandem_[a-z_]+", str(texts)))


def test_every_expression_has_its_value_and_every_alert_fires(tmp_path: Path) -> None:
    assert sorted(expressions()) == sorted(VALUES)
    alerts = re.findall(r"alert: (\w+)", ALERTS.read_text())
    assert sorted(alerts) == sorted(FIRING)
    case = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": values} for name, values in RECORDED.items()
        ],
        "promql_expr_test": [
            {
                "expr": expression, "eval_time": "10m",
                "exp_samples": [{"labels": labels, "value": n} for labels, n in rows.items()],
            }
            for expression, rows in VALUES.items()
        ],
        "alert_rule_test": [
            {
                "alertname": name, "eval_time": "10m",
                "exp_alerts": [{
                    "exp_labels": {"severity": severity, **ALERT_LABELS.get(name, {})},
                    "exp_annotations": {"summary": text},
                }],
            }
            for name, (severity, text) in FIRING.items()
        ],
    }  # fmt: skip
    quiet = {
        "interval": "1m",
        "input_series": [
            {"series": 'tandem_fleet_devices{state="online"}', "values": "9x20"},
            {"series": "tandem_fleet_lease_holder", "values": "1x20"},
        ],
        "alert_rule_test": [{"alertname": name, "eval_time": "15m"} for name in FIRING],
    }
    # JSON is YAML.
    test_file = tmp_path / "test.yaml"
    test_file.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": [case, quiet]}))
    promtool("check", "rules", str(ALERTS))
    promtool("test", "rules", str(test_file))


def test_what_they_ask_for_is_what_a_server_and_a_page_say(
    store: Database, listener: MetricsListener
) -> None:
    fill(store)
    web = WebMeters()
    web.count("GET", "/", 200, 0.01)
    text = scrape(listener) + render(web.read(viewers=1, changed_s=0.0))
    names = names_in(expressions()) | names_in(re.findall("expr: (.*)", ALERTS.read_text()))
    assert names <= names_in(series_of(text))
    assert {name.partition("{")[0] for name in RECORDED} <= names_in(series_of(text))


def test_a_server_says_whether_it_sends_and_what_it_has_heard(
    store: Database, fleet_folder: Fleet
) -> None:
    port, stopped = free_port(), threading.Event()
    assert lease.acquire(store, "another")
    server = FleetServer(fleet_folder, services=(), metrics=("127.0.0.1", port))
    thread = threading.Thread(target=server.serve, args=(stopped,))
    thread.start()
    try:

        def series() -> dict[str, float]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return series_of(answer.read().decode())

        wait_until(lambda: _listens(port), lambda: "nothing listens")
        assert series()["tandem_fleet_lease_holder"] == 0  # it stands by
        lease.release(store, "another")
        wait_until(lambda: series()["tandem_fleet_lease_holder"] == 1, series)
        topics = Topics("d0")
        for topic, payload in (
            (topics.state, encode(StateDocument(state="online", session=1))),
            (topics.reported, encode(report("a"))),
            (topics.reported, b"nonsense"),
        ):
            server._events.put(Message(topic, payload))

        def is_carried_out() -> bool:
            # The server itself finds no broker in between, which would return its claim.
            server._events.put(LinkUp(1, "5"))
            server._events.put(Message(f"{SERVER_CLAIM}/own", encode(server._own_claim())))
            return series()["tandem_fleet_event_delay_seconds_count"] >= 1

        wait_until(is_carried_out, series)
        samples = series()
        assert samples['tandem_fleet_events_total{kind="state"}'] == 1
        assert samples['tandem_fleet_events_total{kind="reported"}'] == 1
        assert samples['tandem_fleet_events_total{kind="unreadable"}'] == 1
        assert samples["tandem_fleet_store_seconds_count"] >= 1
        assert sum(n for name, n in samples.items() if name.startswith("tandem_fleet_devices")) == 1
    finally:
        stopped.set()
        thread.join(30.0)
    assert not _listens(port)


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
