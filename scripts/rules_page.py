"""Render docs/rules.md from the tables of rules.

python -m scripts.rules_page --write     replace the page
python -m scripts.rules_page --check     exit 1 if it is not up to date
"""

import argparse
import sys
from pathlib import Path

from toolkit.engine.reasons import page

PAGE = Path(__file__).parents[1] / "docs" / "rules.md"


def main() -> int:
    """Write the page or check it."""
    parser = argparse.ArgumentParser(description="Render docs/rules.md.")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="replace the page")
    mode.add_argument("--check", action="store_true", help="exit 1 if it is not up to date")
    if parser.parse_args().write:
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() == page():
        return 0
    print(f"{PAGE} is not up to date; run python -m scripts.rules_page --write")
    return 1


if __name__ == "__main__":
    sys.exit(main())
