"""What libraries say, as errors of Tandem repeat it."""

import pytest

from device.errors import LONGEST_QUOTE, shortened
from toolkit.errors import first_line

WORDS = " ".join(f"word{n}" for n in range(200))


@pytest.mark.parametrize("text", ["", "short", "x" * LONGEST_QUOTE])
def test_a_message_that_fits_stays(text: str) -> None:
    assert shortened(text) == text


def test_a_long_message_keeps_its_end_and_whole_words() -> None:
    quote = shortened(WORDS)
    assert len(quote) <= LONGEST_QUOTE + len("... ")
    dots, first, *others = quote.split()
    assert dots == "..."
    assert {first, *others} <= set(WORDS.split())
    assert quote.endswith("word199")
    assert first_line(RuntimeError(WORDS)) == quote


def test_one_long_word_keeps_its_end() -> None:
    assert shortened("y" * 1000) == "... " + "y" * LONGEST_QUOTE
