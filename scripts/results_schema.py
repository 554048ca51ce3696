"""Write the JSON Schema of what pipelines publish, made from the code: docs/schema/results.json.

python -m scripts.results_schema --write
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from device.protocol.messages import Stats
from pipelines.sinks.events import Event
from pipelines.sinks.track_lifecycle import ObjectEvent

PATH = Path(__file__).parents[1] / "docs" / "schema" / "results.json"
PAYLOADS = (Event, ObjectEvent, Stats)  # of detections, events and stats


def schema() -> str:
    """Return the schema as JSON; the payloads are its `$defs` Event, ObjectEvent and Stats."""
    _, components = msgspec.json.schema_components(PAYLOADS, ref_template="#/$defs/{name}")
    page = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": components}
    return json.dumps(page, indent=2) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the schema, or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/schema/results.json")
    if parser.parse_args(arguments).write:
        PATH.parent.mkdir(exist_ok=True)
        PATH.write_text(schema(), encoding="utf-8")
    else:
        print(schema(), end="")


if __name__ == "__main__":
    main()
