"""A program that a test waits for ends the test where it stays silent, or ends."""

import subprocess
import sys

import pytest
from process_lines import next_line

SILENT = "import sys, time\nprint('why it waits', file=sys.stderr)\nprint(1, flush=True)\n"


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize(("then", "limit_s"), [("time.sleep(600)", 0.2), ("sys.exit(3)", 60.0)])
def test_a_silent_program_is_ended_and_its_log_shown(text: bool, then: str, limit_s: float) -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-c", SILENT + then], text=text,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert next_line(process) in ("1\n", b"1\n")
        with pytest.raises(pytest.fail.Exception, match=r"wrote no line within .*why it waits"):
            next_line(process, limit_s=limit_s)
        assert process.poll() is not None
