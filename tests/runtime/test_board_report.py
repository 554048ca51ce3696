"""The report of a board: read with suspicion, and what plans, rules and fits take from it."""

import io
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from model_fixtures import small_convnet
from selftest_reports import network, on_dla, report, rule

from device.errors import ConfigError, TandemError
from device.selftest import private
from device.selftest.engines import INPUT
from device.selftest.private import scrub
from device.selftest.report import (
    MAX_ENTRIES,
    RECORDED,
    NetworkRow,
    RecordedRow,
    Report,
    ReportError,
    is_report,
    read_report,
    write_report,
)
from scripts.board_change import FIGURES, ROOT, RULES, change_of
from scripts.cost_rows import FIGURES as FIGURES_FILE
from scripts.cost_rows import read_rows, report_rows
from scripts.read_board_report import lines
from scripts.rule_corrections import summarize_rules
from toolkit.board_kit.measured import measured_in, times_of
from toolkit.board_kit.recorded import recorded_in
from toolkit.cli.commands.plan import plan
from toolkit.errors import BuildError
from toolkit.importers.source import model_sha256


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "board.tandem-report"


def packed(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_a_report_comes_back_as_it_was_written(path: Path) -> None:
    written = report(network("m", "00", "gpu"))
    write_report(path, written, {"timings.json": b"{}", "recorded/dla-int8.npz": b"x"})
    file = read_report(path)
    assert file.report == written
    assert dict(file.files) == {"timings.json": b"{}", "recorded/dla-int8.npz": b"x"}
    assert is_report(path)


def test_three_contradictions_are_three_corrections_with_their_kind() -> None:
    rules = summarize_rules(report())
    assert [(row.rule, row.kind) for row in rules.corrections] == [
        ("min.conflict", "too strict"),
        ("clip.lower", "too strict"),
        ("resize.mode", "too lax"),
    ]
    assert rules.confirmed == ("conv.stride",)
    assert rules.one_sided == ("pool.window",)
    assert rules.unknown == (("lrn.window-at", "its process crashed (SIGSEGV)"),)
    text = "\n".join(lines(report(), rules))
    assert "3 corrections" in text
    assert "resize.mode (documented) is too lax" in text
    assert "DLA only supports kHALF_PIXEL" in text


def test_the_build_counts_where_it_contradicts_can_run_on_dla() -> None:
    row = msgspec.structs.replace(
        rule("G4", "at", expected=True, takes=True), can_run=True, built=False
    )
    rules = summarize_rules(msgspec.structs.replace(report(), rules=(row,)))
    assert rules.disputed == ("G4-at",)
    assert [row.kind for row in rules.corrections] == ["too lax"]


def test_the_script_prints_corrections_and_says_so_by_its_status(path: Path) -> None:
    write_report(path, report(), {})
    command = [sys.executable, "-m", "scripts.read_board_report", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "correct clip.lower" in done.stdout
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert len(json.loads(done.stdout)["rules"]["corrections"]) == 3


def confirming(rule_id: str, *networks: NetworkRow) -> Report:
    """A report that confirms a rule on both sides, corrects others, and looks like a diff."""
    sides = tuple(
        rule(rule_id, side, expected=side == "at", takes=side == "at") for side in ("at", "beyond")
    )
    document = report(*networks)
    machine = msgspec.structs.replace(
        document.machine, model="Orin\n--- a/README.md\n+++ b/README.md"
    )
    return msgspec.structs.replace(document, rules=(*document.rules, *sides), machine=machine)


def test_a_report_becomes_a_change_that_git_applies(tmp_path: Path, path: Path) -> None:
    for name in (FIGURES, *sorted((ROOT / RULES).glob("*.py"))):
        target = tmp_path / "repo" / (name if name == FIGURES else name.relative_to(ROOT))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    write_report(
        path, confirming("pow.constant", network("resnet18", "aa", "dla", on_dla("c"))), {}
    )
    patch = tmp_path / "report.patch"
    done = subprocess.run(
        [sys.executable, "-m", "scripts.read_board_report", str(path), "--patch", str(patch)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    text = patch.read_text()
    assert "# To decide by hand: toolkit/dla/rules/layer_rules.py:" in text
    assert "resize.mode (documented) is too lax" in text
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path / "repo", check=True)
    before, after = read_rows(FIGURES_FILE)[0], read_rows(tmp_path / "repo" / FIGURES)[0]
    (case,) = after[len(before) :]
    assert (case.network, case.engine, case.precision, case.value) == (
        "resnet18", "dla0", "int8", 1.5,
    )  # fmt: skip
    assert (case.board.profile, case.board.mode) == ("orin-nx-16gb", "MAXN")
    rules = (tmp_path / "repo/toolkit/dla/rules/layer_rules.py").read_text()
    assert rules.count('certainty="recalled"') + 1 == (
        (ROOT / RULES / "layer_rules.py").read_text().count('certainty="recalled"')
    )
    # The same report changes nothing more.
    again = change_of(read_report(path).report, tmp_path / "repo")
    assert not again.files


def test_the_times_of_a_network_are_those_of_its_operations_and_segments() -> None:
    rows = [
        network("m", "aa", "split", on_dla("conv9", time_us=77.0)),
        network("m", "aa", "dla", on_dla("conv0", "relu0")),
        network("m", "aa", "gpu"),
    ]
    times = [(row.nodes, row.processor, row.time_us) for row in times_of(rows)]
    assert times == [
        (("conv0", "relu0"), "gpu", 11.5),
        (("conv0", "relu0"), "dla", 900.0),
        (("conv9",), "dla", 77.0),
    ]


def test_a_segment_that_ran_off_the_dla_gives_it_no_time() -> None:
    rows = [network("m", "aa", "dla", on_dla("conv0", implementation="cuda"))]
    assert [row for row in times_of(rows) if row.processor == "dla"] == []


def test_a_plan_takes_the_times_of_its_model_from_a_report(tmp_path: Path, path: Path) -> None:
    model = small_convnet(tmp_path / "m.onnx", np.random.default_rng(5))
    options = ["--profile", "orin-nx-16gb", "--precision", "int8", "--json"]
    before = json.loads(CliRunner().invoke(plan, [str(model), *options]).output)
    nodes = [node["node"] for node in before["plans"][0]["nodes"]]
    slow = network("m", model_sha256(model), "dla", on_dla(nodes[0], time_us=54321.0))
    slow = msgspec.structs.replace(slow, layers=())
    write_report(path, report(slow), {})
    forced = [*options, "--force-dla", nodes[0], "--measured", str(path), "--power-mode", "MAXN"]
    after = CliRunner().invoke(plan, [str(model), *forced])
    assert after.exit_code == 0, after.output
    assert "54321" in after.output


def test_a_model_that_is_not_in_the_report_is_named_with_those_that_are(path: Path) -> None:
    write_report(path, report(network("resnet18", "aa", "gpu")), {})
    with pytest.raises(ConfigError, match=r"no times of m\.onnx in int8; it has resnet18"):
        measured_in(path, model_sha256="bb", model="m.onnx", precision="int8")


def test_recorded_outputs_are_found_by_the_engine(path: Path) -> None:
    data = io.BytesIO()
    np.savez(data, **{f"{INPUT}x": np.ones(3, np.float32), "y": np.zeros(2, np.int8)})
    rows = (RecordedRow(item="dla-int8", engine_sha256="ab"),)
    written = msgspec.structs.replace(report(), recorded=rows)
    write_report(path, written, {f"{RECORDED}dla-int8.npz": data.getvalue()})
    arrays = recorded_in(path, "ab")
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "x": [1.0, 1.0, 1.0], "y": [0, 0],
    }  # fmt: skip
    with pytest.raises(BuildError, match="it has those of dla-int8"):
        recorded_in(path, "cd")


def test_the_fit_takes_networks_that_ran_whole_on_the_dla() -> None:
    cases, unused = report_rows(
        report(
            network("resnet18", "aa", "dla", on_dla("conv0")),
            network("resnet18", "aa", "gpu"),
            network("mine", "bb", "dla", on_dla("conv0")),
            network("resnet50", "cc", "dla", on_dla("a"), on_dla("b", implementation="cuda")),
        )
    )
    assert [(c.network, c.engine, c.value, c.board.mode) for c in cases] == [
        ("resnet18", "dla0", 1.5, "MAXN")
    ]
    assert [row.line for row in unused] == [2, 3, 4]


def test_a_newer_minor_version_is_read_and_another_major_one_is_not(path: Path) -> None:
    data = msgspec.to_builtins(report())
    data |= {"format": [1, 9], "news": {"a": 1}}
    data["machine"]["colour"] = "green"
    assert read_report(packed(path, {"report.json": json.dumps(data).encode()})).report.rules
    data["format"] = [2, 0]
    packed(path, {"report.json": json.dumps(data).encode()})
    with pytest.raises(ReportError, match="has format 2, this Tandem reads 1; update Tandem"):
        read_report(path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"timings.json": b""}, "holds no report.json"),
        ({"report.json": b"{", "x": b""}, "it holds 'x'"),
        ({"report.json": b"{}", "recorded/../../etc/x.npz": b""}, "it holds"),
        ({"report.json": b"[" * 100_000}, "damaged"),
        ({"report.json": b'{"format":[1,0]}'}, "missing required field"),
        ({"report.json": b""} | {f"recorded/{n}.npz": b"" for n in range(MAX_ENTRIES)}, "entries"),
    ],
)
def test_what_is_no_report_is_refused(path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        read_report(packed(path, files))


def test_an_entry_that_unpacks_to_too_much_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("device.selftest.report.MAX_ENTRY_BYTES", 1000)
    packed(path, {"report.json": b" " * 1000})
    with pytest.raises(ReportError, match="damaged"):
        read_report(path)
    packed(path, {"report.json": b" " * 1001})
    with pytest.raises(ReportError, match="more than 1000 bytes"):
        read_report(path)


def outcome(path: Path) -> str:
    """What reading gives: the path where it is a report, else the error that must name it."""
    try:
        report = read_report(path).report
    except TandemError as error:
        return str(error)
    assert isinstance(report, Report)
    lines(report, summarize_rules(report))
    return str(path)


def test_damaged_reports_give_a_clear_error_and_nothing_else(path: Path) -> None:
    write_report(path, report(network("m", "aa", "dla", on_dla("conv0"))), {"timings.json": b"{}"})
    whole = path.read_bytes()
    rng = random.Random(17)
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data[: rng.randrange(1, len(data) + 1)]))
        assert str(path) in outcome(path)


def mutated(value: object, rng: random.Random) -> object:
    """JSON with one value in it replaced by another kind of one."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        return {**value, key: mutated(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        return [*value[:index], mutated(value[index], rng), *value[index + 1 :]]
    return rng.choice([None, -1, 1e400, "x" * 5000, [], {}, True, 2**70, "\ud800"])


def test_reports_with_other_values_are_read_or_refused(path: Path) -> None:
    plain = msgspec.to_builtins(report(network("m", "aa", "dla", on_dla("conv0"))))
    rng = random.Random(3)
    for _ in range(300):
        packed(path, {"report.json": json.dumps(mutated(plain, rng)).encode()})
        assert str(path) in outcome(path)


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("/home/bob/kit/m.engine: segment 'a'", "(path): segment 'a'"),
        ("connect 192.168.1.20:1883 refused", "connect (address) refused"),
        ("fe80::1ff:fe23:4567:890a is up", "(address) is up"),
        ("eth0 48:b0:2d:12:34:56 up", "eth0 (MAC) up"),
        ("ask bob.b@example.org", "ask (mail)"),
        ("serial 1421223344556", "serial (number)"),
        ("TensorRT 10.3.0.30, DLA core 0", "TensorRT 10.3.0.30, DLA core 0"),
        ("board-7 says: libs of BOARD-7", "(host) says: libs of (host)"),
        ("user rosie-r", "user (user)"),
    ],
)
def test_texts_lose_names_addresses_and_paths(
    text: str, scrubbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private.socket, "gethostname", lambda: "board-7.lan")
    monkeypatch.setattr(private.getpass, "getuser", lambda: "rosie-r")
    assert scrub(text) == scrubbed
