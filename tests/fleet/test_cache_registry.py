"""The cache of builds as an artifact of a real OCI registry."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from registry_fixtures import registry

from toolkit.cache import entries, entry_path, key_of, read_entry, write_entry
from toolkit.cli.main import tandem


def run(*words: str, status: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(tandem, ["cache", *words, "--json"])
    assert done.exit_code == status, (done.output, done.exception)
    return {} if status else dict(json.loads(done.stdout))


def test_a_cache_goes_to_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    contents = {key_of(str(n)): b"%d" % n * 1000 for n in range(3)}
    with registry(tmp_path / "registry") as host:
        words = (f"oci://{host}/team/cache:main", "--plain-http")
        monkeypatch.setenv("TANDEM_CACHE", str(here))
        for key, content in contents.items():
            write_entry("kernels", key, content)
        assert run("push", *words)["sent_files"] == 3
        assert run("push", *words)["sent_files"] == 0
        monkeypatch.setenv("TANDEM_CACHE", str(there))
        write_entry("engines", key_of("mine"), b"mine")
        assert run("pull", *words)["pulled"] == 3
        assert run("pull", *words)["pulled"] == 0
        assert {key: read_entry("kernels", key) for key in contents} == contents
        pushed = run("push", *words)  # what is there stays
        assert (pushed["files"], pushed["sent_files"]) == (4, 1)
        failed = CliRunner().invoke(tandem, ["cache", "pull", f"oci://{host}/no/cache", words[1]])
        assert "holds no cache" in str(failed.exception)


def test_info_and_trim_keep_what_was_used_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    mib = 1 << 20
    for number in range(3):
        write_entry("shards", key_of(str(number)), bytes(mib // 2))
    for number, entry in enumerate(list(entries())):
        os.utime(entry.path, (number, number))
    oldest = next(iter(entries())).key
    read_entry("shards", oldest)  # it is used, and so not the oldest any more
    facts = run("info")
    assert (facts["folder"], facts["kinds"]["shards"]["entries"]) == (str(tmp_path), 3)
    assert run("trim", "--to", "1MiB")["entries"] == 2
    assert [entry.key for entry in entries()] == [oldest]


def test_trim_removes_what_killed_writers_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    write_entry("engines", key_of("whole"), b"whole")
    folder = next(entries()).path.parent
    for name in (".a.0.tmp", "b.part", ".new.0.tmp"):
        (folder / name).write_bytes(bytes(10))
        if "new" not in name:
            os.utime(folder / name, (0, 0))
    assert run("trim", "--to", "1MiB") == {"entries": 2, "bytes": 20}
    assert {path.name for path in folder.iterdir()} == {".new.0.tmp", key_of("whole")}


def test_what_another_process_removes_or_pulls_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, there, name = tmp_path / "here", tmp_path / "there", key_of("kept")
    with registry(tmp_path / "registry") as host:
        words = (f"oci://{host}/team/cache:main", "--plain-http")
        monkeypatch.setenv("TANDEM_CACHE", str(here))
        write_entry("kernels", name, b"kept")
        write_entry("kernels", key_of("removed"), b"removed")
        present = list(entries())
        entry_path("kernels", key_of("removed")).unlink()
        monkeypatch.setattr("toolkit.cli.actions.cache.entries", lambda: present)
        assert run("push", *words)["files"] == 1
        assert "was removed meanwhile" in caplog.text
        monkeypatch.setenv("TANDEM_CACHE", str(there))
        second = entry_path("kernels", name)
        second.parent.mkdir(parents=True)
        part = second.with_name(f"{name}.part")
        part.write_bytes(b"x")  # of a pull at the same time
        assert run("pull", *words)["pulled"] == 1
        assert (read_entry("kernels", name), part.read_bytes()) == (b"kept", b"x")
        assert len(list(second.parent.iterdir())) == 2
