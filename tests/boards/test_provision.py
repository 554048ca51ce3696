"""Provisioning at the line: the table that goes in, and the file of results that only grows."""

import csv
import errno
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import board_fixtures
import pytest
from board_fixtures import colour_bundle
from click.testing import CliRunner
from fresh_board import PASSWORD, FreshBoard
from hypothesis import given
from hypothesis import strategies as st
from mqtt_fixtures import Mosquitto
from packaging.requirements import Requirement
from video_fixtures import COLOUR_TOML, scene, write_video
from wheel_fixtures import empty_wheel, tandem_wheel

from device.numpy_bound import ANY_NUMPY, NUMPY_1
from toolkit.cli.actions.board.provision import _AskOnce
from toolkit.cli.main import tandem
from toolkit.errors import BoardError
from toolkit.fleet.boards import wheels
from toolkit.fleet.boards.probe import Package, Probe, changed_packages
from toolkit.fleet.boards.provision import check_serial
from toolkit.fleet.boards.provision_table import (
    MAX_ROWS,
    OUTPUT,
    LineResult,
    LineRow,
    Provisioned,
    ResultFile,
    parse_rows,
    provision_rows,
)
from toolkit.fleet.boards.setup import InitOptions, Setup, State
from toolkit.fleet.boards.shell import AskPassword, Done, Shell
from toolkit.fleet.boards.texts import ETC, AgentSettings, agent_toml, announcement_text, unit_text
from toolkit.fleet.boards.trust import CA, look_trust
from toolkit.fleet.boards.wheels import (
    _as_tested,
    environment_of,
    gather,
    locked_versions,
    missing,
    own_wheel,
    platform_tags,
    requirements_of,
)
from toolkit.fleet.folder import make_fleet
from toolkit.fleet.transports.addresses import parse_address

TABLE = """serial,device,address,group,labels
1420121000001,board-1,ssh://robot@10.0.0.1,canary,site=lab;line=2
1420121000002,,,,
"""


def test_a_table_is_read() -> None:
    first, second = parse_rows(TABLE, "in.csv")
    labels = {"site": "lab", "line": "2", "group": "canary"}
    assert first == LineRow("1420121000001", "board-1", "ssh://robot@10.0.0.1", "", labels)
    assert second == LineRow("1420121000002", "1420121000002")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("device\nb\n", "has no column serial of its own"),
        ("serial,colour\n1,red\n", "has the column 'colour'"),
        ("serial,serial\n1,1\n", "has no column serial of its own"),
        ("serial,device\n1\n", "in.csv, line 2: it has another number of cells"),
        ("serial\n1,2\n", "in.csv, line 2: it has another number of cells"),
        ("serial,device\n,b\n", "in.csv, line 2: the serial number is empty"),
        ("serial,device\n1,a/b\n", "in.csv, line 2: 'a/b' is not the id of a device"),
        ("serial,labels\n1,site\n", "in.csv, line 2: 'site' is no label"),
        ("serial\n1\n2\n1\n", "has the serial '1' twice"),
        ("serial,device\n1,b\n2,b\n", "has the device 'b' twice"),
        ('serial\n"1', "unexpected end of data"),
    ],
)
def test_a_table_that_is_wrong_is_refused_with_its_line(text: str, words: str) -> None:
    with pytest.raises(BoardError) as caught:
        parse_rows(text, "in.csv")
    assert words in str(caught.value)


@given(st.text(max_size=200))
def test_no_table_raises_anything_else(text: str) -> None:
    try:
        parse_rows(f"serial,device\n{text}", "in.csv")
    except BoardError:
        return


def test_a_table_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_ROWS == 100_000
    monkeypatch.setattr("toolkit.fleet.boards.provision_table.MAX_ROWS", 1000)
    text = "serial\n" + "".join(f"{number}\n" for number in range(1000))
    assert len(parse_rows(text, "in.csv")) == 1000
    with pytest.raises(BoardError, match="has more than 1000 rows: cut it into several"):
        parse_rows(f"{text}x\n", "in.csv")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(rows: tuple[LineRow, ...], out: Path, broken: set[str], retries: int = 1, jobs: int = 1):
    """Provision with a double that fails for some boards; return the attempts by serial number."""
    attempts: list[str] = []
    lock = threading.Lock()

    def provision(row: LineRow) -> Provisioned:
        with lock:
            attempts.append(row.serial)
        if row.serial in broken:
            raise BoardError('the board\ndoes not answer, "really"')
        return Provisioned("beef", "robot 1", "00" * 32, "ssh://b")

    results = ResultFile(out)
    try:
        ended = provision_rows(
            rows, results, provision, retries=retries, jobs=jobs, on_result=lambda _: None
        )
    finally:
        results.close()
    return attempts, ended


def test_a_run_goes_on_where_it_was_and_tries_the_failed_again(tmp_path: Path) -> None:
    out, rows = tmp_path / "results.csv", tuple(LineRow(str(n), f"b{n}") for n in range(4))
    attempts, ended = run(rows, out, {"2"}, jobs=3)
    assert sorted(attempts) == ["0", "1", "2", "2", "3"]
    assert [result.result for result in ended] == ["ok", "ok", "failed", "ok"]
    failed = next(row for row in rows_of(out) if row["serial"] == "2")
    assert failed["reason"] == 'the board does not answer, "really"'
    assert (failed["attempts"], failed["certificate"]) == ("2", "")
    again, ended = run(rows, out, set())
    assert again == ["2"]
    assert [row["serial"] for row in rows_of(out) if row["result"] == "ok"][-1] == "2"
    assert run(rows, out, set())[0] == []


def test_a_power_cut_at_any_byte_loses_the_torn_line_alone(tmp_path: Path) -> None:
    out, rows = tmp_path / "results.csv", tuple(LineRow(str(n), f"b{n}") for n in range(2))
    run(rows, out, set())
    whole = out.read_bytes()
    for cut in range(len(whole)):
        out.write_bytes(whole[:cut])
        attempts, _ = run(rows, out, set(), retries=0)
        assert len(attempts) == 2 - max(0, whole[:cut].count(b"\n") - 1), cut
        table = rows_of(out)
        assert sorted(row["serial"] for row in table) == ["0", "1"]
        assert tuple(table[0]) == OUTPUT


def test_another_file_is_not_overwritten_and_two_runs_do_not_mix(tmp_path: Path) -> None:
    out = tmp_path / "in.csv"
    out.write_text("serial,device\n" + "1,b\n" * 100)
    with pytest.raises(BoardError, match="is no file of results"):
        ResultFile(out)
    assert out.read_text().startswith("serial,device\n1,b")
    lone = ResultFile(tmp_path / "results.csv")
    with pytest.raises(BoardError, match="another run writes"):
        ResultFile(tmp_path / "results.csv")
    lone.close()


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = ResultFile(tmp_path / "results.csv")

    def full(_handle: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    row = LineResult(LineRow("1", "b"), "ok", "", 1, Provisioned(), "now", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr("toolkit.fleet.boards.provision_table.os.write", full)
        with pytest.raises(BoardError, match="No space left"):
            results.add(row)
    results.close()
    with pytest.raises(BoardError, match="cannot write /dev/full"):
        ResultFile(Path("/dev/full"))


def test_after_ctrl_c_no_other_attempt_begins(tmp_path: Path) -> None:
    attempts: list[str] = []
    begun = threading.Event()

    def provision(row: LineRow) -> Provisioned:
        if row.serial == "0":
            assert begun.wait(30.0)
            raise KeyboardInterrupt
        attempts.append(row.serial)
        begun.set()
        time.sleep(0.01)
        raise BoardError("ssh was interrupted, too")

    results = ResultFile(tmp_path / "results.csv")
    with pytest.raises(KeyboardInterrupt):
        provision_rows(
            (LineRow("0", "a"), LineRow("1", "b")),
            results, provision, retries=2000, jobs=2, on_result=lambda _: None,
        )  # fmt: skip
    results.close()
    assert 0 < len(attempts) < 2000


# -- what is decided of one board


def probe(**changes: object) -> Probe:
    values = {
        "python": (3, 10, 12), "abi": "cp310", "machine": "aarch64", "glibc": "2.35",
        "free_mb": 9000, "model": "NVIDIA Jetson Orin NX", "serial": "142", "host": "jetson",
        "compatible": "nvidia,p3768-0000+p3767-0000-super\0nvidia,p3767-0000\0nvidia,tegra234",
        "nv_release": "# R36 (release), REVISION: 4.3, GCID: 1", "systemd": True,
        "packages": {"numpy": Package(version="1.26.4", path="/usr/n", digest="a")},
        "distributions": {"numpy": "1.26.4", "click": "8.0.3"}, "numpy": NUMPY_1,
    }  # fmt: skip
    return Probe(**{**values, **changes})


def test_a_board_says_what_it_is() -> None:
    assert (probe().profile, probe().jetpack) == ("orin-nx-16gb-super", "6.2")
    assert (probe(compatible="x").profile, probe(nv_release="").jetpack) == ("", "")
    check_serial(probe(), LineRow("142", "b"))
    check_serial(probe(serial=""), LineRow("143", "b"))  # it does not say it
    with pytest.raises(BoardError, match="has the serial number 142, its row has 143"):
        check_serial(probe(), LineRow("143", "b"))


def test_trust_that_was_cut_off_is_sent_again_and_no_other_fleets_is(tmp_path: Path) -> None:
    (tmp_path / "trust").mkdir()
    for name in ("root.json", "ca.crt"):
        (tmp_path / "trust" / name).write_bytes(b"ours")

    class NoShell:
        name = "b"

    def look(**present: bytes | None) -> State:
        names = {"root": f"{ETC}/trust/root.json", "copy": f"{ETC}/trust/ca.crt", "ca": CA}
        settings = AgentSettings("b", "laptop", "h", 1)
        options = InitOptions(settings=settings, wheel=tmp_path, work=tmp_path, fleet=tmp_path)
        cache = {path: present.get(name) for name, path in names.items()}
        return look_trust(Setup(NoShell(), probe(), options, "robot", (), cache))

    assert look().kind == "todo"
    assert look(root=b"newer", copy=b"ours", ca=b"ours").kind == "already"
    assert look(root=b"ours", copy=b"ours").kind == "todo"  # the agent reads CA
    for content in (None, b"theirs"):
        with pytest.raises(BoardError, match="belongs to another fleet"):
            look(root=content, ca=b"theirs")


def test_a_change_of_the_systems_packages_is_seen() -> None:
    second = probe(packages={"numpy": Package(version="2.0.0", path="/usr/n", digest="b")})
    assert changed_packages(probe(), probe()) == ()
    assert changed_packages(probe(), second) == ("numpy",)
    assert changed_packages(probe(), probe(packages={})) == ("numpy",)


def test_only_what_the_board_lacks_is_sent() -> None:
    rows = [
        (Requirement("click>=8.1"), ""),
        (Requirement("numpy>=1.23"), ""),
        (Requirement('tomli; python_version < "3.11"'), ""),
        (Requirement('tuf>=7; extra == "fleet"'), "fleet"),
        (Requirement('onnxruntime; extra == "portable"'), "fleet"),
        (Requirement("tuf<8"), ""),
    ]
    board = probe()
    lacking = missing(rows, board.distributions, environment_of(board))
    assert sorted(map(str, lacking.values())) == ["click>=8.1", "tomli", "tuf<8,>=7"]
    newer = probe(python=(3, 12, 3))
    assert "tomli" not in missing(rows, newer.distributions, environment_of(newer))


def test_wheels_of_older_systems_run_on_newer_ones() -> None:
    tags = platform_tags("aarch64", "2.35")
    assert tags[0] == "manylinux_2_35_aarch64"
    assert {"manylinux_2_17_aarch64", "manylinux2014_aarch64"} <= set(tags)
    assert "manylinux_2_36_aarch64" not in tags


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tandem_wheel(tmp_path_factory)


def test_the_closure_is_made_by_the_boards_python_and_machine(tmp_path: Path, wheel: Path) -> None:
    place, work = tmp_path / "wheels", tmp_path / "work"
    place.mkdir()
    work.mkdir()
    names = {row.name for row, extra in requirements_of(wheel, ()) if not extra}
    assert {"click", "msgspec"} <= names
    arm = "cp310-cp310-manylinux_2_17_aarch64"
    empty_wheel(place, "msgspec", "0.20.0", arm)
    empty_wheel(place, "msgspec", "0.21.0", "cp310-cp310-manylinux_2_17_x86_64")
    empty_wheel(place, "click", "8.2.0", "py3-none-any", 'inner; python_version < "3.11"')
    empty_wheel(place, "inner", "1.0", "cp310-abi3-manylinux_2_28_aarch64")
    for name, version in (
        ("paho_mqtt", "2.2"),
        ("rich", "14.0"),
        ("tomli", "2.0"),
        ("xxhash", "3.0"),
    ):
        empty_wheel(place, name, version, "py3-none-any")
    sent = [path.name for path in gather(wheel, (), probe(), work, place)]
    assert sent[0] == wheel.name
    assert f"msgspec-0.20.0-{arm}.whl" in sent
    assert "inner-1.0-cp310-abi3-manylinux_2_28_aarch64.whl" in sent
    assert not any(name.startswith("numpy") for name in sent)  # JetPack's is new enough
    (place / f"msgspec-0.20.0-{arm}.whl").unlink()
    (work / f"msgspec-0.20.0-{arm}.whl").unlink()
    with pytest.raises(BoardError, match=r"no wheels of .*msgspec.* for Python 3.10 on aarch64"):
        gather(wheel, (), probe(), work, place)


def test_an_old_numpy_of_the_system_gets_one_of_its_generation_beside_it(
    tmp_path: Path, wheel: Path
) -> None:
    old = Package(version="1.21.5", path="/usr/n", digest="a")
    present = dict.fromkeys(("click", "msgspec", "paho-mqtt", "rich", "tomli", "xxhash"), "99")
    board = probe(packages={"numpy": old}, distributions={**present, "numpy": "1.21.5"})
    place, work = tmp_path / "wheels", tmp_path / "work"
    place.mkdir()
    work.mkdir()
    for version in ("1.26.4", "2.2.6"):
        empty_wheel(place, "numpy", version, "cp310-cp310-manylinux2014_aarch64")
    names = [path.name for path in gather(wheel, (), board, work, place)]
    assert names[1:] == ["numpy-1.26.4-cp310-cp310-manylinux2014_aarch64.whl"]
    # One that is too new for cv2 already is no reason to send none.
    board = probe(distributions={**present, "numpy": "2.2.6"})
    names = [path.name for path in gather(wheel, (), board, work, place)]
    assert names[1:] == ["numpy-1.26.4-cp310-cp310-manylinux2014_aarch64.whl"]
    board = probe(distributions={**present, "numpy": "2.2.6"}, numpy=ANY_NUMPY)
    assert gather(wheel, (), board, work, place) == (wheel,)


@given(st.text(max_size=40), st.text(max_size=40))
def test_whatever_is_asked_for_agent_toml_is_whole_or_refused(device: str, label: str) -> None:
    settings = AgentSettings(device, "laptop", "h", 1, labels={"site": label})
    try:
        text = agent_toml(settings)
    except BoardError:
        return
    assert f'device = "{device}"' in text


def test_the_files_of_a_board_say_whose_they_are() -> None:
    unit = unit_text("robot", ("video",))
    assert "User=robot\n" in unit
    assert "SupplementaryGroups=video\n" in unit
    assert "ExecStart=/opt/tandem/bin/tandem-agent --config /etc/tandem/agent.toml\n" in unit
    announced = announcement_text("a<b", "me", 2222)
    assert "<name>a&lt;b</name>" in announced
    assert "<port>2222</port>" in announced


# -- sudo's password


class SudoBoard(Shell):
    """A board whose sudo takes one password; `tried` has all that it was given."""

    def __init__(self, ask: AskPassword, password: str) -> None:
        super().__init__(parse_address("ssh://robot@b"), ask)
        self.tried: list[str] = []
        self._right = password

    def run(self, script: str, stdin: bytes = b"") -> Done:
        if script.startswith("id -u"):
            return Done(0, b"1000\nrobot\nsudo\n", "")
        if " -S " not in script:
            return Done(1, b"", "sudo: a password is required")
        self.tried.append(stdin.decode().rstrip("\n"))
        right = self.tried[-1] == self._right
        return Done(0 if right else 1, b"", "" if right else "Sorry, try again.")

    def become_root(self) -> list[str]:
        """Become root on a new connection; return the passwords that were tried for it."""
        self.tried, self._sudo = [], None
        self._become_root()
        return self.tried


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an operator types, in this order."""
    words: list[str] = []
    monkeypatch.delenv("TANDEM_SUDO_PASSWORD", raising=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        "toolkit.cli.actions.board.shell.click.prompt", lambda *_, **__: words.pop(0)
    )
    return words


def test_a_password_that_was_mistyped_is_asked_for_again(
    typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    once = _AskOnce()
    typed += ["rigth", "right"]
    board, next_board = SudoBoard(once.ask, "right"), SudoBoard(once.ask, "right")
    assert board.become_root() == ["rigth", "right"]
    assert "sudo did not take this password of robot on robot@b: type it again" in (
        capsys.readouterr().err
    )
    assert next_board.become_root() == ["right"]  # nobody is asked any more
    second = SudoBoard(once.ask, "another")
    typed += ["another"]
    assert second.become_root() == ["right", "another"]
    typed += ["a", "b", "c"]
    with pytest.raises(BoardError, match="sudo does not take the password of robot"):
        SudoBoard(once.ask, "none").become_root()
    assert typed == ["c"]  # the one that was known counts, too


def test_what_one_operator_typed_is_taken_by_boards_that_waited(typed: list[str]) -> None:
    once = _AskOnce()
    typed += ["x", "y"]
    assert (once.ask("a"), once.ask("b")) == ("x", "x")
    assert (once.ask("a", "x"), once.ask("b", "x")) == ("y", "y")


def test_the_password_of_the_environment_is_tried_once(
    typed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_SUDO_PASSWORD", "wrong")
    board = SudoBoard(_AskOnce().ask, "right")
    with pytest.raises(BoardError, match="the password in TANDEM_SUDO_PASSWORD for robot on"):
        board.become_root()
    assert (board.tried, typed) == (["wrong"], [])


# -- the whole line


@pytest.mark.slow
def test_a_board_of_the_line_gets_its_identity_and_its_release(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_SUDO_PASSWORD", PASSWORD)
    broker = Mosquitto(tmp_path)
    fleet, table, out = tmp_path / "robots", tmp_path / "in.csv", tmp_path / "results.csv"
    make_fleet(fleet, name="robots", broker=f"127.0.0.1:{broker.tls_port}")
    fresh = FreshBoard(tmp_path / "board")
    video = write_video(tmp_path / "video.mp4", [scene(2, 3)] * 10)
    fresh.run(f"cp {video} /opt/video.mp4")
    of_board = COLOUR_TOML.replace("{uri}", "/opt/video.mp4")
    monkeypatch.setattr(board_fixtures, "COLOUR_TOML", of_board)
    bundle = colour_bundle(tmp_path / "in", source="loop = true")
    table.write_text(
        f"serial,device,address,group\n1,board-1,{fresh.address},canary\n2,board-2,ssh://127.0.0.1:1,\n"
    )
    words = ("board", "provision", "--csv", str(table), "--out", str(out), "--fleet", str(fleet))
    words += ("--wheel", str(wheel), "--profile", "laptop", "--retries", "0", "--json")
    words += ("--bundle", str(bundle))
    try:
        done = CliRunner().invoke(tandem, words)
        assert done.exit_code == 1, (done.output, done.exception)
        first, second = rows_of(out)
        assert (first["device"], first["result"], first["reason"]) == ("board-1", "ok", "")
        assert int(first["certificate"], 16) > 0
        assert (first["bundle"], len(first["sha256"])) == ("colours 1", 64)
        assert (second["result"], "cannot be reached" in second["reason"]) == ("failed", True)
        assert "group" in fresh.run("cat /etc/tandem/agent.toml")
        again = CliRunner().invoke(tandem, words)
        assert again.exit_code == 1
        summary = json.loads(again.stdout)
        assert (summary["ok"], summary["failed"], summary["skipped"]) == (0, 1, 1)
    finally:
        fresh.close()
        broker.close()


def test_a_result_is_one_line_whatever_it_says(tmp_path: Path) -> None:
    results = ResultFile(tmp_path / "r.csv")
    row = LineRow("1", "b")
    results.add(LineResult(row, "failed", 'a\r\n"b",c\0', 1, Provisioned(), "now", 1.25))
    results.close()
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 2
    ResultFile(tmp_path / "r.csv").close()


def test_the_versions_that_were_tested_go_to_a_board(tmp_path: Path) -> None:
    assert locked_versions(probe())["msgspec"]
    assert locked_versions(probe(python=(3, 12, 3)))["numpy"].startswith("1.")
    assert locked_versions(probe(python=(3, 11, 2))) == {}
    assert str(_as_tested(Requirement("click>=8.1"), "8.2")) == "click==8.2"
    assert str(_as_tested(Requirement("click>=8.1"), "8.0")) == "click>=8.1"
    assert str(_as_tested(Requirement("click[a]>=8.1"), "8.1")) == "click[a]==8.1"
    assert str(_as_tested(Requirement("click>=8.1"), None)) == "click>=8.1"


def test_an_installed_wheel_is_packed_again_as_it_came(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, out = tmp_path / "site", tmp_path / "out"
    out.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--no-deps", "--no-index")
    pip = (*pip, "--target")
    subprocess.run((*pip, str(site), str(wheel)), check=True)
    monkeypatch.setattr(wheels, "ROOT", site)
    again = own_wheel(out)
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert set(second.namelist()) == set(first.namelist())
        assert all(
            first.read(name) == second.read(name)
            for name in first.namelist()
            if not name.endswith("RECORD")
        )
    subprocess.run((*pip, str(tmp_path / "board"), str(again)), check=True)  # pip takes it
    with (site / "tandem/__init__.py").open("a") as file:
        file.write("# mine\n")
    with pytest.raises(BoardError, match="was changed after it was installed"):
        own_wheel(out)


def test_a_wheel_is_built_beside_an_old_setuptools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stock Python 3.10 or 3.11 has setuptools 65.5: the build gets one of its own."""
    about = tmp_path / "old" / "setuptools-65.5.0.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: setuptools\nVersion: 65.5.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "old"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(BoardError) as caught:
        own_wheel(tmp_path)
    message = str(caught.value)
    assert (
        "it takes setuptools>=77, and here is 65.5.0, and pip could not download a newer" in message
    )
    assert "pip install 'setuptools>=77' here, or name a wheel with --wheel" in message


def test_a_wheel_is_built_with_what_pyproject_asks_for() -> None:
    text = (wheels.ROOT / "pyproject.toml").read_text()
    assert f"requires = {json.dumps(list(wheels.BUILD_REQUIRES))}" in text
