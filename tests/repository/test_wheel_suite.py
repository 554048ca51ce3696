"""The suite runs against the installed wheel, beside a stranger's packages of our names."""

import pytest

from scripts.wheel_suite import READS_THE_CHECKOUT, ROOT, main


@pytest.mark.slow
def test_tests_pass_against_the_wheel() -> None:
    assert main(["tests/quantize/test_state.py", "tests/agent/test_smp.py", "-n", "0"]) == 0
    assert main(["tests/no_such_file.py"]) != 0


def test_what_reads_the_checkout_is_there() -> None:
    for name in READS_THE_CHECKOUT:
        path, _, function = name.partition("::")
        assert (ROOT / path).exists(), name
        if function:
            assert f"def {function}(" in (ROOT / path).read_text(), name
