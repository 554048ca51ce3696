"""A folder that workers of pytest share is filled once, and again only where that has failed."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shared_folder import shared_folder


def test_all_who_ask_get_what_one_has_filled(tmp_path_factory: pytest.TempPathFactory) -> None:
    fills: list[Path] = []

    def fill(folder: Path) -> None:
        fills.append(folder)
        (folder / "whole").touch()
        if len(fills) == 1:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        shared_folder(tmp_path_factory, "test-shared", fill)
    with ThreadPoolExecutor(4) as threads:
        jobs = [
            threads.submit(shared_folder, tmp_path_factory, "test-shared", fill) for _ in range(4)
        ]
        folders = {job.result(60) for job in jobs}
    assert len(fills) == 2
    assert [path.name for path in folders.pop().iterdir()] == ["whole"]
    assert not folders
