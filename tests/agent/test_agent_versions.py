"""Versions of the agent: which one is started, which boards fit, and power cuts at any write."""

import contextlib
import errno
import os
import random
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from crash_states import Tree, record, states
from msgspec.structs import replace
from wheel_fixtures import agent_wheel

from device.agent import command_line, launch
from device.agent.agent_trial import AgentTrial
from device.agent.command_line import main
from device.agent.environment import make_environment
from device.errors import BrokerError, BundleError, ConfigError, StateError, TandemError, TrustError
from device.files import write_synced
from device.update import agent_versions as av
from device.update.agent_payload import AgentPayload, BoardSoftware, unfit
from device.update.agent_versions import AgentVersions, TrialTerms
from device.update.slot_store import SlotStore
from toolkit.fleet.bundles.agent import pack_agent

BOARD = BoardSoftware(python="3.10.12", machine="aarch64", glibc="2.35", l4t="36.4.3")
NO_L4T = BoardSoftware(python="3.12.3", machine="x86_64", glibc="2.39", l4t="")

# versions, the environments that are whole, the one that is started; who is on trial then, and who
# is given up
STARTS = [
    (AgentVersions(current="b", previous="a", failed_starts=2), "ab", "b", "", ""),
    (AgentVersions(), "", "", "", ""),
    (AgentVersions(current="b"), "b", "b", "", ""),
    (AgentVersions(current="b", previous="a"), "a", "a", "", "b"),
    (AgentVersions(current="b", previous="a"), "", "", "", "b"),
    (AgentVersions(current="a", trial="b"), "ab", "b", "b", ""),
    (AgentVersions(current="a", trial="b"), "a", "a", "", "b"),
    (AgentVersions(current="a", trial="b", starts=1), "ab", "a", "", "b"),
    (AgentVersions(current="a", trial="b", starts=1), "b", "", "", "b"),
    (AgentVersions(trial="b", starts=1), "b", "", "", "b"),
]


@pytest.mark.parametrize(("versions", "whole", "name", "trial", "failed"), STARTS)
def test_the_version_that_is_started(
    versions: AgentVersions, whole: str, name: str, trial: str, failed: str
) -> None:
    after, started = av.at_start(versions, lambda one: one in whole and one != "")
    assert (started, after.trial, after.starts, after.failed) == (
        name, trial, int(bool(trial)), failed,
    )  # fmt: skip
    assert trial or after.current == name


def test_a_version_that_was_kept_and_never_runs_gives_way_after_three_starts() -> None:
    versions, started = AgentVersions(current="b", previous="a", request="r"), []
    for _ in range(7):
        versions, name = av.at_start(versions, bool)
        started.append(name)
        if len(started) == 4:
            assert (versions.failed, versions.request) == ("b", "r")
            assert "ended 3 times before it ran" in versions.reason
    assert started == ["b", "b", "b", "a", "a", "a", ""]
    started_again = av.at_start(AgentVersions(current="b", failed_starts=2), bool)[0]
    for running, failed_starts in (("b", 0), ("a", 3), ("", 3)):
        noted = av.while_running(started_again, running, mqtt=False, pipeline=False)
        assert noted == AgentVersions(current="b", failed_starts=failed_starts)


def test_starts_of_the_version_before_count_where_the_current_one_is_gone() -> None:
    versions, started = AgentVersions(current="b", previous="a"), []
    for _ in range(4):
        versions, name = av.at_start(versions, lambda one: one == "a")
        started.append(name)
    assert started == ["a", "a", "a", ""]
    assert versions.failed == "a"


def test_a_current_version_that_is_tried_again_and_fails_is_left() -> None:
    terms = TrialTerms(mqtt=True, pipeline=False)
    versions = av.begin_trial(AgentVersions(current="b", previous="a"), "b", terms)
    versions, first = av.at_start(versions, bool)
    assert (first, av.at_start(versions, bool)[1]) == ("b", "a")
    assert av.confirm(versions) == AgentVersions(current="b", previous="a")


@pytest.mark.parametrize("mqtt", [True, False])
@pytest.mark.parametrize("pipeline", [True, False])
def test_a_trial_is_confirmed_once_what_worked_works(mqtt: bool, pipeline: bool) -> None:
    versions = av.begin_trial(AgentVersions(), "b", TrialTerms(mqtt, pipeline))
    confirmed = AgentVersions(current="b")
    for works_mqtt, works_pipeline, is_kept in (
        (mqtt, pipeline, True), (False, True, not mqtt), (True, False, not pipeline),
    ):  # fmt: skip
        noted = av.while_running(versions, "b", mqtt=works_mqtt, pipeline=works_pipeline)
        assert noted == (confirmed if is_kept else versions)
    assert av.while_running(versions, "", mqtt=True, pipeline=True) == versions


def test_what_is_two_behind_is_obsolete() -> None:
    versions = av.confirm(AgentVersions(current="b", previous="a", trial="c", starts=1))
    assert versions == AgentVersions(current="c", previous="b")
    assert av.obsolete(versions, ("a", "b", "c", ".d.tmp", av.FILE)) == ("a", ".d.tmp")


REFUSALS = [
    (AgentPayload(), BOARD, ()),
    (AgentPayload(min_python="3.10", below_python="3.11", machine="aarch64"), BOARD, ()),
    (
        AgentPayload(min_python="3.10", below_python="3.11"),
        NO_L4T,
        ("it needs Python 3.10 or newer, older than 3.11, this board has 3.12.3",),
    ),
    (AgentPayload(min_l4t="36.4"), BOARD, ()),
    (AgentPayload(below_l4t="36"), BOARD, ("it needs L4T older than 36, this board has 36.4.3",)),
    (AgentPayload(min_l4t="36"), NO_L4T, ("it needs L4T 36 or newer, this board has none",)),
    (
        AgentPayload(min_glibc="2.38", machine="x86_64"),
        BOARD,
        (
            "it needs glibc 2.38 or newer, this board has 2.35",
            "its wheels are for x86_64, this board is aarch64",
        ),
    ),
]


@pytest.mark.parametrize(("payload", "board", "reasons"), REFUSALS)
def test_a_board_that_does_not_fit(
    payload: AgentPayload, board: BoardSoftware, reasons: tuple[str, ...]
) -> None:
    assert unfit(payload, board) == reasons


def test_a_file_of_versions_that_is_not_whole_starts_the_installed_agent(tmp_path: Path) -> None:
    av.write_versions(tmp_path, AgentVersions(current="b"))
    path = tmp_path / av.FOLDER / av.FILE
    newer = path.read_bytes()[:-1] + b',"field_of_a_later_version":1}'
    path.write_bytes(newer)
    assert av.read_versions(tmp_path) == AgentVersions(current="b")
    path.write_bytes(newer[:-3])
    assert av.read_versions(tmp_path) == AgentVersions()


def test_a_second_agent_is_no_start_of_a_trial(tmp_path: Path) -> None:
    config, root = tmp_path / "agent.toml", tmp_path / "state"
    config.write_text('state_dir = "state"\n')
    noted = AgentVersions(trial="b", starts=1)
    av.write_versions(root, noted)
    store = SlotStore(root)  # what the agent that runs holds
    assert _start(config) == ""
    assert av.read_versions(root) == noted
    store.close()
    assert _start(config) == ""
    assert av.read_versions(root).failed == "b"


def test_a_wrong_agent_toml_takes_no_version_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, root = tmp_path / "agent.toml", tmp_path / "state"
    config.write_text('state_dir = "state"\nkey_that_nobody_knows = 1\n')
    for name in "ab":
        _executable(root, name)
    noted = AgentVersions(current="b", previous="a", failed_starts=1)  # it was killed once
    av.write_versions(root, noted)
    for _ in range(5):
        assert _start(config) == "b"
        with monkeypatch.context() as patch:
            patch.setenv(launch.ENVIRONMENT, "b")
            assert main(["--config", str(config)]) == 1
        assert "key_that_nobody_knows" in capsys.readouterr().err
        assert av.read_versions(root) == noted
    tried = av.begin_trial(noted, "a", TrialTerms(mqtt=False, pipeline=False))
    av.write_versions(root, tried)
    assert _start(config) == "a"
    monkeypatch.setenv(launch.ENVIRONMENT, "a")
    assert main(["--config", str(config)]) == 1  # the version before had read it
    monkeypatch.delenv(launch.ENVIRONMENT)
    assert _start(config) == "b"
    assert av.read_versions(root).failed == "a"


@pytest.mark.parametrize("kind", [StateError, TrustError, BrokerError, ConfigError])
def test_a_kept_version_that_always_ends_with_an_error_is_given_up(
    kind: type[TandemError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise kind("not of agent.toml")

    config, root = tmp_path / "agent.toml", tmp_path / "state"
    config.write_text(
        'device = "d"\nprofile = "orin-nano-8gb"\nstate_dir = "state"\ndev = true\n'
        '[broker]\nhost = "localhost"\n'
    )
    for name in "ab":
        _executable(root, name)
    av.write_versions(root, AgentVersions(current="b", previous="a"))
    monkeypatch.setattr(command_line, "serve", fail)
    started = []
    for _ in range(4):
        started.append(_start(config))
        with monkeypatch.context() as patch:
            patch.setenv(launch.ENVIRONMENT, started[-1])
            assert main(["--config", str(config)]) == 1
    assert started == ["b", "b", "b", "a"]
    assert av.read_versions(root).failed == "b"


def _executable(root: Path, name: str) -> None:
    """An environment whose interpreter is no program."""
    python = av.python_of(root, name)
    python.parent.mkdir(parents=True)
    python.write_bytes(b"\0")
    python.chmod(0o700)


def _cannot_execute(config: Path, number: int) -> str:
    """Start the agent where no version can be executed; return what it says. `number`: of errno."""
    error = OSError(number, os.strerror(number))
    with mock.patch.object(os, "execve", side_effect=error), pytest.raises(StateError) as failure:
        launch.launch(config, [])
    return str(failure.value)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN, errno.EIO])
def test_a_version_that_once_could_not_be_executed_stays(number: int, tmp_path: Path) -> None:
    config, root = tmp_path / "agent.toml", tmp_path / "state"
    config.write_text('state_dir = "state"\n')
    for name in "ab":
        _executable(root, name)
    noted = AgentVersions(current="b", previous="a")
    av.write_versions(root, noted)
    assert os.strerror(number) in _cannot_execute(config, number)
    assert av.read_versions(root) == replace(noted, failed_starts=1)
    assert _start(config) == "b"


def test_a_version_that_the_system_cannot_execute_is_given_up_after_three_starts(
    tmp_path: Path,
) -> None:
    config, root = tmp_path / "agent.toml", tmp_path / "state"
    config.write_text('state_dir = "state"\n')
    for name in "abt":
        _executable(root, name)
    av.write_versions(root, AgentVersions(current="b", previous="a", trial="t"))
    with mock.patch.object(launch, "_watch"), pytest.raises(StateError, match="version b "):
        launch.launch(config, [])  # that of the trial fails, too: nothing here is a program
    versions = av.read_versions(root)
    assert (versions.trial, versions.failed, versions.failed_starts) == ("", "t", 1)
    for name in "bb":
        assert f"version {name} " in _cannot_execute(config, errno.ENOMEM)
    assert _start(config) == "a"
    assert av.read_versions(root).failed == "b"


def test_where_no_start_can_be_counted_the_installed_agent_goes_on(tmp_path: Path) -> None:
    config, root = tmp_path / "agent.toml", tmp_path / "state"
    config.write_text('state_dir = "state"\n')
    _executable(root, "b")
    noted = AgentVersions(current="b")
    av.write_versions(root, noted)
    with mock.patch.object(av, "write_versions", side_effect=OSError(errno.EROFS, "read-only")):
        launch.launch(config, [])
    assert av.read_versions(root) == noted


@pytest.mark.parametrize("name", ["../../x", "..", ".x.tmp", "a/b", "x\n", "", "é"])
def test_an_odd_name_is_no_version(tmp_path: Path, name: str) -> None:
    root = tmp_path / "one" / "state"
    for folder in (root / av.FOLDER / name, root / av.FOLDER):
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "python").symlink_to(sys.executable)
        if name in ("", ".."):
            break
    assert "no whole environment" in AgentTrial(root, {}).begin(name, TrialTerms(False, False))
    assert av.at_start(AgentVersions(trial=name), lambda one: av.is_usable(root, one))[1] == ""


def test_an_environment_whose_python_is_gone_is_made_anew(tmp_path: Path) -> None:
    bundle = tmp_path / "agent.bundle"
    pack_agent(bundle, agent_wheel(tmp_path / "wheels", "1.0"), "")
    for _ in range(2):
        make_environment(bundle, tmp_path / av.FOLDER, "1.0-x")
        assert av.is_usable(tmp_path, "1.0-x")
        python = av.python_of(tmp_path, "1.0-x")
        python.unlink()
        python.symlink_to("/usr/bin/python3.1")


def test_a_wheel_with_a_name_that_leads_out_is_refused(tmp_path: Path) -> None:
    folder = agent_wheel(tmp_path / "wheels", "1.0")
    with zipfile.ZipFile(folder / "tandem_edge-1.0-py3-none-any.whl", "a") as archive:
        archive.writestr("tandem/../../evil.py", "")
    bundle = tmp_path / "agent.bundle"
    pack_agent(bundle, folder, "")
    with pytest.raises(BundleError, match="leads out of it"):
        make_environment(bundle, tmp_path / "agent", "1.0-x")
    assert not (tmp_path / "agent" / "1.0-x").exists()


# -- power cuts


def _link_double(target: str, path: Path) -> None:
    """A double of os.symlink, which the recorder does not know: a file that runs."""
    write_synced(path, [target.encode()])
    path.chmod(0o700)


class _ExecutedError(Exception):
    """This process would be another program now."""


def _start(config: Path) -> str:
    """Start the agent as the unit does; return the version that it becomes."""
    with (
        mock.patch.object(os, "execve", side_effect=_ExecutedError) as execve,
        mock.patch.object(launch, "_watch"),
        contextlib.suppress(_ExecutedError),
    ):
        launch.launch(config, [])
    return "" if not execve.called else str(execve.call_args[0][2][launch.ENVIRONMENT])


def _story(root: Path, config: Path, bundles: dict[str, Path], mark: Callable[[Any], None]) -> None:
    """Three versions: `1` is kept, `2` never confirms itself, `3` and `4` are kept."""
    current = ""
    mark({current})
    for name, bundle in bundles.items():
        make_environment(bundle, root / av.FOLDER, name)
        mark({current, name})
        running = AgentTrial(root, {launch.ENVIRONMENT: current} if current else {})
        running.stage(name)
        assert AgentTrial(root, {}).versions.staged == name
        assert running.begin(name, TrialTerms(mqtt=True, pipeline=False)) == ""
        assert _start(config) == name
        mark({current} if name == "2" else {current, name})
        trial = AgentTrial(root, {launch.ENVIRONMENT: name})
        trial.advance(0.0, mqtt=False, pipeline=True)
        assert av.read_versions(root).trial == name
        if name == "2":
            assert _start(config) == current
            mark({current})
            continue
        trial.advance(0.0, mqtt=True, pipeline=False)
        current = name
        mark({current})


def _story_of_failed_starts(
    root: Path, config: Path, bundles: dict[str, Path], mark: Callable[[Any], None]
) -> None:
    """Two versions are kept; the second one runs, and then ends before it runs, three times, and
    once more by a wrong agent.toml. The first one is started then, until its Python is gone."""
    mark(({""}, 0))
    previous = ""
    for name in "12":
        make_environment(bundles[name], root / av.FOLDER, name)
        mark(({previous, name}, 0))
        running = AgentTrial(root, {launch.ENVIRONMENT: previous} if previous else {})
        assert running.begin(name, TrialTerms(mqtt=False, pipeline=False)) == ""
        assert _start(config) == name
        AgentTrial(root, {launch.ENVIRONMENT: name}).advance(0.0, mqtt=True, pipeline=True)
        previous = name
        mark(({name}, 0))
    assert _start(config) == "2"
    mark(({"2"}, 0))
    AgentTrial(root, {launch.ENVIRONMENT: "2"}).advance(0.0, mqtt=False, pipeline=False)
    assert av.read_versions(root).failed_starts == 0
    for count in (1, 2, 3):
        assert _start(config) == "2"
        if count == 2:
            mark(({"2"}, 1))
            with mock.patch.dict(os.environ, {launch.ENVIRONMENT: "2"}):
                launch.excuse_start(config)
            assert av.read_versions(root).failed_starts == 1
            assert _start(config) == "2"
        mark(({"1"} if count == 3 else {"1", "2"} if count == 2 else {"2"}, count))
    assert _start(config) == "1"
    mark(({"1", ""}, 1))
    av.python_of(root, "1").unlink()
    assert _start(config) == ""
    assert av.read_versions(root).current == ""
    mark(({""}, 0))


def _story_of_a_version_that_is_gone(
    root: Path, config: Path, bundles: dict[str, Path], mark: Callable[[Any], None]
) -> None:
    """Two versions are kept, and the Python of the second one goes: starts of the first count."""
    names = {""}
    mark((names, 0))
    for name in "12":
        make_environment(bundles[name], root / av.FOLDER, name)
        names = {*names, name}
        mark((names, 0))
    av.write_versions(root, AgentVersions(current="2", previous="1"))
    mark(({"1", "2"}, 0))
    av.python_of(root, "2").unlink()
    for count in (1, 2, 3):
        assert _start(config) == "1"
        mark(({"1", ""} if count >= 2 else {"1"}, count))
    assert _start(config) == ""
    mark(({""}, 0))


def _check(tree: Tree, claim: Any, whole: dict[str, Tree], root: Path) -> None:
    """The version that is started after a cut is one that may be, and all of it is there."""
    (root / av.FOLDER / av.FILE).unlink(missing_ok=True)
    content = tree.get(f"{av.FOLDER}/{av.FILE}")
    if content is not None:
        (root / av.FOLDER).mkdir(exist_ok=True)
        (root / av.FOLDER / av.FILE).write_bytes(content)
    versions = av.read_versions(root)
    started = av.at_start(versions, lambda one: f"{av.FOLDER}/{one}/bin/python" in tree)[1]
    names, failed_starts = claim if isinstance(claim, tuple) else (claim, 0)
    assert started in names
    assert versions.failed_starts >= failed_starts or versions.failed
    if started:
        prefix = f"{av.FOLDER}/{started}/"
        parts = {path: data for path, data in tree.items() if path.startswith(prefix)}
        assert parts == whole[started]


def _enumerate(tmp_path: Path, *, file_syncs: bool = True, story: Any = _story) -> int:
    bundles = {}
    for name in "1234":
        bundles[name] = tmp_path / f"{name}.bundle"
        pack_agent(bundles[name], agent_wheel(tmp_path / f"wheels-{name}", name), "")
    root, config, whole = tmp_path / "state", tmp_path / "agent.toml", dict[str, Tree]()
    root.mkdir()
    config.write_text('state_dir = "state"\nkey_of_a_later_version = 1\n')
    with (
        mock.patch.object(os, "symlink", _link_double),
        record(root) as recording,
        mock.patch("device.files.os.fsync", os.fsync if file_syncs else lambda handle: None),
    ):
        story(root, config, bundles, recording.mark)
    (tmp_path / "again").mkdir()
    for name, bundle in bundles.items():
        with mock.patch.object(os, "symlink", _link_double):
            make_environment(bundle, tmp_path / "again", name)
        place = tmp_path / "again" / name
        whole[name] = {
            f"{av.FOLDER}/{name}/{path.relative_to(place).as_posix()}":
                None if path.is_dir() else path.read_bytes()
            for path in place.rglob("*")
        }  # fmt: skip
    (tmp_path / "crashed").mkdir()
    count = 0
    with mock.patch("logging.Logger._log"):
        for state in states(recording, random.Random(1), most_subsets=16):
            count += 1
            if state.claim is None:
                continue
            try:
                _check(state.tree, state.claim, whole, tmp_path / "crashed")
            except AssertionError as error:
                where = f"cut after operation {state.cut}, lost {state.lost}, torn {state.torn}"
                raise AssertionError(f"{where}: {error}") from error
    return count


def test_a_power_cut_at_any_write_starts_a_whole_version(tmp_path: Path) -> None:
    assert _enumerate(tmp_path) > 1000


def test_a_power_cut_forgets_no_failed_start(tmp_path: Path) -> None:
    assert _enumerate(tmp_path, story=_story_of_failed_starts) > 500


def test_a_power_cut_forgets_no_start_of_the_version_before(tmp_path: Path) -> None:
    assert _enumerate(tmp_path, story=_story_of_a_version_that_is_gone) > 300


def test_the_checker_notices_counts_that_are_not_synced(tmp_path: Path) -> None:
    def story(
        root: Path, config: Path, bundles: dict[str, Path], mark: Callable[[Any], None]
    ) -> None:
        """Its environments are synced; the counts are not."""

        def mark_and_lose(claim: Any) -> None:
            mark(claim)
            if claim == ({"2"}, 0):
                stack.enter_context(mock.patch("device.files.os.fsync", return_value=None))

        with contextlib.ExitStack() as stack:
            _story_of_failed_starts(root, config, bundles, mark_and_lose)

    with pytest.raises(AssertionError, match="cut after operation"):
        _enumerate(tmp_path, story=story)


def test_the_checker_notices_files_that_are_not_synced(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="cut after operation"):
        _enumerate(tmp_path, file_syncs=False)
