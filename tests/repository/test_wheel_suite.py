"""The suite runs against the installed wheel, beside a stranger's packages of our names."""

import pytest

from scripts.wheel_suite import main


@pytest.mark.slow
def test_tests_pass_against_the_wheel() -> None:
    assert main(["tests/quantize/test_state.py", "tests/agent/test_smp.py", "-n", "0"]) == 0
    assert main(["tests/no_such_file.py"]) != 0
