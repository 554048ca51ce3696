"""Deployments through real brokers to real agent processes, with the breaks that happen outside."""

import hashlib
import os
import queue
import select
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from deploy_fixtures import address, deploy
from mqtt_fixtures import DEVICE, WAIT_S, AgentBox, Mosquitto, Watcher, free_port, make_bundle

import configs
from device.errors import BrokerError, BundleError, DeployError
from device.protocol.documents import CHUNK_BYTES, PipelineReport
from device.protocol.mqtt import Link, LinkEvent, LinkSettings, Message
from device.protocol.topics import Topics
from device.update.bundle import verify_folder
from toolkit.cli.commands.build import build as build_command
from toolkit.cli.commands.bundle import bundle as bundle_command
from toolkit.cli.commands.deploy import deploy as deploy_command
from toolkit.fleet.brokers.address import BrokerAddress, parse_broker
from toolkit.fleet.brokers.local import start_broker
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.transports.deploy import DeployOptions, deploy_bundle
from toolkit.fleet.transports.device_deployment import DeployProgress, DeployResult


def once_at(chunks: int, act: Callable[[], None]) -> Callable[[DeployProgress], None]:
    """Do something in the middle: nothing is served while it is being done."""
    done = threading.Event()

    def on_progress(progress: DeployProgress) -> None:
        if progress.sent_chunks >= chunks and not done.is_set():
            done.set()
            act()

    return on_progress


def test_a_release_becomes_live_through_mosquitto(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    bundle = make_bundle(tmp_path / "in")
    board.start()
    result = deploy(broker.port, bundle)
    assert (result.phase, result.reason) == ("live", "")
    assert verify_folder(board.state_dir / "slots" / "a").name == "good"
    assert "with MQTT 5" in board.log()
    assert [name for name, _pid in board.runs()] == ["good"]
    assert list((board.state_dir / "download").iterdir()) == []


def test_a_release_becomes_live_through_the_embedded_broker(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "in")
    with start_broker() as embedded:
        box = AgentBox(tmp_path, embedded.port)
        box.start()
        try:
            result = deploy(embedded.port, bundle)
        finally:
            box.close()
    assert result.phase == "live", result
    assert "with MQTT 3.1.1" in box.log()


def test_a_document_that_is_said_again_is_answered_again_without_mqtt_5(tmp_path: Path) -> None:
    """A server may sit at another node of a cluster than the device's retained report."""
    topic = Topics(DEVICE).desired
    events: queue.Queue[LinkEvent] = queue.Queue()
    with start_broker() as embedded:
        box = AgentBox(tmp_path, embedded.port)
        box.start()
        settings = LinkSettings("127.0.0.1", embedded.port, "server", ((topic, 1),))
        link = Link(settings, events.put)
        try:
            bundle = make_bundle(tmp_path / "in")
            assert deploy(embedded.port, bundle).live
            link.start()
            while not isinstance(event := events.get(timeout=WAIT_S), Message):
                pass
            with Watcher(embedded.port) as watcher:
                watcher.wait_report("live")
                # An agent does not report what has not changed, but for this. Something may change
                # meanwhile: the figures of the download are forgotten, the disk has other room.
                for _ in range(10):
                    known = len(watcher.drain().reports)
                    link.publish(topic, event.payload, qos=1, retain=True)
                    while len(watcher.seen.reports) == known:
                        assert watcher.take(WAIT_S), "the device said nothing"
                    last, before = (
                        msgspec.structs.replace(report, counter=0)
                        for report in reversed(watcher.seen.reports[-2:])
                    )
                    if last == before:
                        break
                else:
                    pytest.fail("it reports only what has changed")
        finally:
            link.close()
            box.close()


@pytest.mark.parametrize("is_earlier_there", [True, False])
def test_a_device_gets_the_difference_from_what_it_runs(
    tmp_path: Path, broker: Mosquitto, board: AgentBox, is_earlier_there: bool
) -> None:
    first, second = (make_bundle(tmp_path / "in", version=version) for version in "12")
    board.start()
    assert deploy(broker.port, first).live
    earlier = first.parent if is_earlier_there else None
    result = deploy(broker.port, second, DeployOptions(WAIT_S, earlier=earlier))
    assert result.live, result
    assert verify_folder(board.state_dir / "slots" / "b").version == "2"
    if is_earlier_there:
        assert result.sent_bytes < result.total_bytes / 4
    else:
        assert result.sent_bytes >= result.total_bytes - 65536


def test_the_same_release_again_moves_no_bytes(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    first, second = (make_bundle(tmp_path / v, version=v) for v in ("1", "2"))
    board.start()
    for bundle in (first, second):
        assert deploy(broker.port, bundle).live
    active = deploy(broker.port, second)
    back = deploy(broker.port, first)
    assert (active.phase, active.sent_bytes) == ("live", 0)
    assert (back.phase, back.sent_bytes) == ("live", 0)  # it was still in the idle slot


def test_an_agent_killed_in_a_download_goes_on_where_it_was(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    bundle = make_bundle(tmp_path / "in", engine_bytes=8 * 1024**2)
    blob = Blob(bundle)
    total = blob.table.count
    blob.close()
    board.start()
    on_disk: set[int] = set()
    before = 0
    with Watcher(broker.port) as watcher:

        def kill_and_restart() -> None:
            nonlocal before
            board.kill()
            watcher.wait_state("lost")
            before = len(watcher.seen.requests)
            on_disk.update(chunks_on_disk(board, bundle))
            board.start()

        result = deploy(broker.port, bundle, on_progress=once_at(60, kill_and_restart))
        watcher.wait_report("live")
        numbers = [n for request in watcher.seen.requests[before:] for n in request.chunks]
    assert result.phase == "live", result
    assert 0 < len(on_disk) < total
    assert not on_disk & set(numbers)
    assert set(numbers) == set(range(total)) - on_disk


def chunks_on_disk(board: AgentBox, bundle: Path) -> set[int]:
    (part,) = (board.state_dir / "download").glob("*.part")
    data, blob = part.read_bytes(), Blob(bundle)
    table = blob.table
    blob.close()
    pieces = (data[start : start + table.size(n)] for n, start in enumerate(table.starts[:-1]))
    return {number for number, piece in enumerate(pieces) if table.fits(number, piece)}


def test_a_broker_killed_in_a_download_costs_only_time(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    bundle = make_bundle(tmp_path / "in", engine_bytes=8 * 1024**2)
    board.start()

    def restart_broker() -> None:
        broker.kill()
        broker.start()

    result = deploy(broker.port, bundle, on_progress=once_at(40, restart_broker))
    assert result.phase == "live", result


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("fails", "camera /dev/video9 does not exist"),
        ("exits", "status 3: Traceback (most recent call last): | ValueError: scores [1,80]"),
        ("hangs", "gave no result within 2 s"),
    ],
)
def test_a_broken_release_is_rolled_back_and_says_why(
    tmp_path: Path, broker: Mosquitto, behaviour: str, message: str
) -> None:
    box = AgentBox(tmp_path, broker.port, trial_timeout_s=2.0)  # the good one must be quicker
    box.start()
    try:
        good = make_bundle(tmp_path / "good")
        bad = make_bundle(tmp_path / "bad", behaviour)
        assert deploy(broker.port, good).live
        result = deploy(broker.port, bad)
        assert result.phase == "rolled_back"
        assert message in result.reason
        with Watcher(broker.port) as watcher:
            report = watcher.wait_report("rolled_back", pipeline=PipelineReport(status="running"))
            assert report.running is not None
            assert report.running.name == "good"
            again = deploy(broker.port, bad)
            assert (again.phase, again.sent_bytes) == ("rolled_back", 0)
            assert again.reason.startswith("this release was rolled back before at 20")
            assert message in again.reason
            assert "--retry" in again.reason
            retried = deploy(broker.port, bad, DeployOptions(WAIT_S, retry=True))
            assert (retried.phase, retried.reason) == ("rolled_back", result.reason)
            assert retried.sent_bytes == 0  # it was still in the idle slot
            watcher.wait_report("trial")
            watcher.wait_report("rolled_back", pipeline=PipelineReport(status="running"))
    finally:
        box.close()
    assert [name for name, _pid in box.runs()] == ["good", behaviour, "good", behaviour, "good"]


def test_the_command_needs_no_room_for_temporary_files(
    tmp_path: Path, broker: Mosquitto, board: AgentBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.start()
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    bundle = make_bundle(tmp_path / "in")
    options = ["--device", DEVICE, "--broker", f"127.0.0.1:{broker.port}", "--timeout", "20"]
    done = CliRunner().invoke(deploy_command, [str(bundle), *options])
    assert done.exit_code == 0, done.output


def test_a_bundle_that_changes_while_it_is_deployed_is_named(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    board.start()
    bundle = make_bundle(tmp_path / "in", engine_bytes=8 * 1024**2)

    def change() -> None:
        with bundle.open("r+b") as file:
            file.truncate(0)

    with pytest.raises(BundleError, match="was changed while it was deployed"):
        deploy(broker.port, bundle, on_progress=once_at(10, change))
    good = make_bundle(tmp_path / "good", version="2")
    assert deploy(broker.port, good).live


def test_a_stranger_who_sends_bad_chunks_does_not_cost_the_release(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    board.start()
    bundle = make_bundle(tmp_path / "in", engine_bytes=4 * 1024**2)
    sha256 = hashlib.sha256(bundle.read_bytes()).hexdigest()
    with Watcher(broker.port) as stranger:

        def disturb() -> None:
            for turn in range(200):
                peer = "/mallory" if turn % 2 else ""
                topic = f"{Topics(DEVICE).root}/blob/{sha256}/{turn % 60}{peer}"
                stranger.link.publish(topic, b"x" * CHUNK_BYTES, qos=1, wait_s=WAIT_S)

        result = deploy(broker.port, bundle, on_progress=once_at(5, disturb))
    assert result.live, result


def test_a_damaged_bundle_is_refused_before_it_is_deployed(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "in")
    data = bytearray(bundle.read_bytes())
    data[5000] ^= 1
    bundle.write_bytes(data)
    options = ["--device", DEVICE, "--broker", "127.0.0.1:1"]
    done = CliRunner().invoke(deploy_command, [str(bundle), *options])
    assert isinstance(done.exception, BundleError)
    assert "does not match its sha256" in str(done.exception)


def test_unsigned_releases_are_refused_unless_dev_is_set(tmp_path: Path, broker: Mosquitto) -> None:
    box = AgentBox(tmp_path, broker.tls_port, dev=False, ca=broker.ca)
    box.start()
    try:
        bundle = make_bundle(tmp_path / "in")
        result = deploy(broker.port, bundle)
    finally:
        box.close()
    assert (result.phase, result.sent_bytes) == ("refused", 0)
    assert "not signed" in result.reason
    assert "dev = true" in result.reason


def test_a_release_for_another_profile_is_refused(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    board.start()
    bundle = make_bundle(tmp_path / "in", profile="orin-nano-8gb")
    result = deploy(broker.port, bundle)
    assert (result.phase, result.sent_bytes) == ("refused", 0)
    assert "is built for orin-nano-8gb, this device is test-board" in result.reason


def test_a_device_that_never_connected_is_named(tmp_path: Path, broker: Mosquitto) -> None:
    bundle = make_bundle(tmp_path / "in")
    result = deploy(broker.port, bundle, DeployOptions(0.5), device="nobody")
    assert result.phase == "timeout"
    assert "no agent ever connected to this broker as nobody" in result.reason


def test_a_device_that_was_off_takes_the_release_when_it_comes(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    bundle = make_bundle(tmp_path / "in")
    started = threading.Event()

    def start_late(_progress: DeployProgress) -> None:
        if not started.is_set():  # the desired document is out, nobody answered yet
            started.set()
            board.start()

    result = deploy(broker.port, bundle, on_progress=start_late)
    assert result.phase == "live", result


def test_a_newer_deployment_supersedes_an_older_one(tmp_path: Path, broker: Mosquitto) -> None:
    first, second = (make_bundle(tmp_path / v, version=v) for v in ("1", "2"))
    results = []

    def older() -> None:
        results.append(deploy(broker.port, first))

    thread = threading.Thread(target=older)
    with Watcher(broker.port):
        thread.start()
        # Takes its place again and again until the older one has seen it: no order is assumed.
        while thread.is_alive():
            deploy(broker.port, second, DeployOptions(0.3))
        thread.join()
    assert results[0].phase == "superseded"
    assert "good 2" in results[0].reason


def test_an_unreachable_broker_is_one_sentence(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "in")
    port = free_port()
    with pytest.raises(BrokerError, match=f"cannot reach the broker at 127.0.0.1:{port}") as info:
        deploy(port, bundle, DeployOptions())
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("h", "h", 1883), ("h:1", "h", 1), ("[::1]:1884", "::1", 1884), ("[::1]", "::1", 1883)],
)
def test_broker_addresses(text: str, host: str, port: int) -> None:
    parsed = parse_broker(text)
    assert (parsed.host, parsed.port) == (host, port)


@pytest.mark.parametrize("text", ["h:0", "h:65536", "h:x", ":1883"])
def test_wrong_broker_addresses_are_refused(text: str) -> None:
    with pytest.raises(BrokerError, match="is not host:port"):
        parse_broker(text)


@pytest.mark.parametrize("device", ["", "+", "#", "a/b", "x" * 65, "board-1\n"])
def test_what_is_no_id_of_a_device_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(DeployError, match="is not the id of a device") as info:
        deploy(1, make_bundle(tmp_path), DeployOptions(), device=device)
    assert "\n" not in str(info.value)


def test_passwords_are_not_in_what_is_printed() -> None:
    assert "s3cret" not in repr(BrokerAddress("h", 1, "u", "s3cret"))


def test_the_command_exits_with_0_only_for_a_live_release(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    board.start()
    runner = CliRunner()
    options = ["--device", DEVICE, "--broker", f"127.0.0.1:{broker.port}", "--timeout", "20"]
    good, bad = make_bundle(tmp_path / "good"), make_bundle(tmp_path / "bad", "fails")
    live = runner.invoke(deploy_command, [str(good), *options])
    assert live.exit_code == 0, live.output
    assert f"good 1 is live on {DEVICE}" in live.output
    failed = runner.invoke(deploy_command, [str(bad), *options])
    assert isinstance(failed.exception, DeployError)
    as_json = runner.invoke(deploy_command, [str(bad), *options, "--json"])
    assert as_json.exit_code == 1
    assert '"phase":"rolled_back"' in as_json.stdout


@pytest.fixture
def fleet(tmp_path: Path, broker: Mosquitto) -> Iterator[Callable[..., AgentBox]]:
    """Starts boards beside each other: each has a folder, an agent process and a profile."""
    boxes: list[AgentBox] = []

    def start(device: str, **options: Any) -> AgentBox:
        (tmp_path / device).mkdir()
        boxes.append(AgentBox(tmp_path / device, device=device, **{"port": broker.port, **options}))
        boxes[-1].start()
        return boxes[-1]

    yield start
    for box in boxes:
        box.close()


def test_several_devices_take_a_release_and_none_waits_for_a_slow_one(
    tmp_path: Path, broker: Mosquitto, fleet: Callable[..., AgentBox]
) -> None:
    bundle = make_bundle(tmp_path / "in", engine_bytes=8 * 1024**2)
    boards = {device: fleet(device) for device in ("slow", "b", "c")}
    process = boards["slow"].process
    assert process is not None
    phases: dict[str, str] = {}
    stopped = threading.Event()

    def hold_one_up(progress: DeployProgress) -> None:
        phases[progress.device] = progress.phase
        if progress.device == "slow" and progress.sent_chunks >= 10 and not stopped.is_set():
            stopped.set()
            process.send_signal(signal.SIGSTOP)
        if phases.get("b") == phases.get("c") == "live":
            process.send_signal(signal.SIGCONT)

    results = deploy_bundle(
        bundle, tuple(boards), address(broker.port), DeployOptions(WAIT_S), on_progress=hold_one_up
    )
    assert stopped.is_set()
    assert [(result.device, result.phase) for result in results] == [
        (device, "live") for device in boards
    ]
    assert results[0].duration_s > max(results[1].duration_s, results[2].duration_s)
    for box in boards.values():
        assert verify_folder(box.state_dir / "slots" / "a").name == "good"


def test_the_command_names_each_device_that_failed(
    tmp_path: Path, broker: Mosquitto, fleet: Callable[..., AgentBox]
) -> None:
    bundle = make_bundle(tmp_path / "in")
    fleet("good-1")
    fleet("other", profile="orin-nano-8gb")
    fleet("closed", port=broker.tls_port, dev=False, ca=broker.ca)
    named = [f"--device={name}" for name in ("good-1", "other", "closed", "absent")]
    options = [*named, "--broker", f"127.0.0.1:{broker.port}", "--timeout", "8"]
    runner = CliRunner()
    done = runner.invoke(deploy_command, [str(bundle), *options])
    assert isinstance(done.exception, DeployError)
    assert "good 1 is live on good-1" in done.stdout
    first, *lines = str(done.exception).split("\n  ")
    assert first == "3 of 4 devices failed"
    assert [line.partition(":")[0] for line in lines] == [
        "good 1 was refused by other",
        "good 1 was refused by closed",
        "good 1 is not live on absent",
    ]
    assert "built for test-board, this device is orin-nano-8gb" in lines[0]
    assert "not signed" in lines[1]
    assert "no agent ever connected to this broker as absent" in lines[2]
    # A line of progress for each device, with its last phase.
    for line in ("good-1: live", "other: refused", "closed: refused", "absent: silent"):
        assert line in done.stderr
    as_json = runner.invoke(deploy_command, [str(bundle), *options[:3], *options[4:], "--json"])
    results = [msgspec.json.decode(line, type=DeployResult) for line in as_json.stdout.splitlines()]
    assert as_json.exit_code == 1
    assert [(result.device, result.phase) for result in results] == [
        ("good-1", "live"),
        ("other", "refused"),
        ("closed", "refused"),
    ]


def test_a_device_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="board-1 is named twice"):
        deploy_bundle(make_bundle(tmp_path), ("board-1", "b", "board-1"), address(1))


def test_a_pipeline_does_not_outlive_a_killed_agent(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    board.start()
    bundle = make_bundle(tmp_path / "in")
    assert deploy(broker.port, bundle).live
    ((_name, pid),) = board.runs()
    watch = os.pidfd_open(pid)
    board.kill()
    ready, _, _ = select.select([watch], [], [], WAIT_S)
    os.close(watch)
    assert ready, "the pipeline still runs"


def test_a_login_is_used_and_never_shown(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "in")
    login = ("fleet", "s3cret-word")
    mosquitto = Mosquitto(tmp_path, login)
    box = AgentBox(tmp_path, mosquitto.port, login=login)
    box.start()
    try:
        wrong = BrokerAddress("127.0.0.1", mosquitto.port, "fleet", "wr0ng-word")
        with pytest.raises(BrokerError, match="refused the connection: Not authorized") as info:
            deploy_bundle(bundle, (DEVICE,), wrong, DeployOptions(WAIT_S))[0]
        right = BrokerAddress("127.0.0.1", mosquitto.port, *login)
        result = deploy_bundle(bundle, (DEVICE,), right, DeployOptions(WAIT_S))[0]
        ((_name, pipeline),) = box.runs()
        # A command line is there for all users to read.
        assert b"s3cret-word" not in Path(f"/proc/{pipeline}/cmdline").read_bytes()
        environment = Path(f"/proc/{pipeline}/environ").read_bytes()
        assert b"TANDEM_MQTT_PASSWORD=s3cret-word" in environment
    finally:
        box.close()
        mosquitto.close()
    assert result.phase == "live", result
    assert "word" not in str(info.value)
    assert "s3cret-word" not in box.log()


@pytest.fixture(scope="module")
def real_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, built and packed by the commands that a user types."""
    folder = tmp_path_factory.mktemp("real")
    engine, out = folder / "objects.engine", folder / "objects.bundle"
    model = configs.ROOT / "models" / "robot-objects.onnx"
    runner = CliRunner()
    build = [str(model), "--profile", "laptop", "--precision", "fp32", "-o", str(engine)]
    built = runner.invoke(build_command, build)
    assert built.exit_code == 0, built.output
    pipeline = configs.ROOT / "pipelines" / "robot-objects.toml"
    labels = configs.ROOT / "models" / "robot-objects.labels.txt"
    inputs = [str(engine), "--pipeline", str(pipeline), "--labels", str(labels), "-o", str(out)]
    packed = runner.invoke(bundle_command, inputs)
    assert packed.exit_code == 0, packed.output
    assert "objects 0.1.0 for laptop" in packed.output
    return out


@pytest.mark.parametrize(
    ("source", "phase", "message"),
    [
        (configs.ROOT / "scenes" / "heldout", "live", ""),
        (Path("/nowhere/camera.mp4"), "rolled_back", "/nowhere/camera.mp4"),
    ],
)
def test_the_real_pipeline_is_tried_too(
    tmp_path: Path, broker: Mosquitto, real_bundle: Path, source: Path, phase: str, message: str
) -> None:
    box = AgentBox(tmp_path, broker.port, profile="laptop", source=source)
    box.start()
    try:
        result = deploy(broker.port, real_bundle)
    finally:
        box.close()
    assert result.phase == phase, result
    assert message in result.reason
    assert "Traceback" not in result.reason
