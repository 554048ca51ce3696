"""scripts/release.py: the same commit gives the same bytes, wherever it is built."""

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from docs_fixtures import ROOT

from scripts.release import build, normalized


def packed(folder: Path, names: list[str], mode: int) -> bytes:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(name)
        (folder / name).chmod(mode)
    with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
        for name in names:
            archive.add(folder / name, name)
    return (folder / "a.tar.gz").read_bytes()


def test_archives_of_the_same_files_become_the_same_bytes(tmp_path: Path) -> None:
    first = packed(tmp_path / "first", ["b", "a"], 0o600)
    second = packed(tmp_path / "second", ["a", "b"], 0o664)
    assert first != second
    assert normalized(first, 7) == normalized(second, 7)
    with tarfile.open(fileobj=io.BytesIO(normalized(first, 7))) as archive:
        rows = [(m.name, oct(m.mode), m.mtime, m.uid, m.uname) for m in archive.getmembers()]
        assert rows == [("a", "0o644", 7, 0, ""), ("b", "0o644", 7, 0, "")]
        content = archive.extractfile("b")
        assert content is not None
        assert content.read() == b"b"


@pytest.mark.slow
def test_a_commit_is_built_to_the_same_bytes_twice(tmp_path: Path) -> None:
    another = tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(another)], check=True)
    before = os.umask(0o077)
    try:
        (another / "stray.py").write_text("not committed")
        first = build(another, tmp_path / "first")
    finally:
        os.umask(before)
    second = build(ROOT, tmp_path / "second")
    assert [path.name for path in first] == [path.name for path in second]
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name
    assert len(first[-1].read_text().splitlines()) == 2
