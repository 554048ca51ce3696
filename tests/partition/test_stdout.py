"""Standard output belongs to the result, whatever native libraries print."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from toolkit.partition.solver.milp import Program


def test_streams_that_are_closed_or_full_change_no_more_than_they_did(tmp_path: Path) -> None:
    shell = 'exec "$@" {}'.format
    command = [sys.executable, "-m", "toolkit.cli", "profiles", "--json"]
    closed = subprocess.run(
        ["sh", "-c", shell("2>&-"), "sh", *command], cwd=tmp_path, capture_output=True, check=False
    )
    assert (closed.returncode, bool(json.loads(closed.stdout))) == (0, True)
    without = subprocess.run(
        ["sh", "-c", shell(">&-"), "sh", *command], cwd=tmp_path, capture_output=True, check=False
    )
    assert (without.returncode, without.stdout) == (0, b"")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=full, check=False)
        assert done.returncode != 0


@pytest.mark.parametrize("words", [("profiles",), ("profiles", "--json"), ("--help",)])
def test_a_full_disk_behind_standard_output_ends_in_a_sentence(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "toolkit.cli", *words],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == (
        "error: standard output cannot be written: No space left on device; the result is "
        "incomplete: free space, or write it elsewhere\n"
    )


def test_an_error_is_said_though_nobody_reads_what_was_printed_before() -> None:
    program = (
        "import sys; from device.start.stdout import drop_unwritten, reserve_stdout\n"
        "reserve_stdout(); sys.stdout.write('a part'); drop_unwritten(); sys.exit('error: why')"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True,
        check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "error: why\n")


def test_the_solver_prints_nothing_into_any_thread_of_a_program(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Run as a library there is no descriptor of the result: HiGHS is silent itself."""

    def solve() -> None:
        program = Program()
        x = program.binary()
        program.at_least(x, 1.0)
        assert program.minimise(x, 1.0).values is not None
        assert program.relaxed(x) is not None

    threads = [threading.Thread(target=solve) for _ in range(4)]
    for thread in threads:
        thread.start()
        os.write(1, b"mine\n")
    for thread in threads:
        thread.join()
    assert capfd.readouterr().out == "mine\n" * 4
