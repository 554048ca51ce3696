"""`tandem build-all`: every engine of a matrix of models, profiles and precisions."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.cli.command import FILE, argument, command, json_option, option
from toolkit.cli.options.model import html_option


@dataclass(frozen=True, slots=True)
class BuildAll:
    """Build every model of a MATRIX for every profile and precision.

    The engines are those of `tandem build`, byte for byte. Builds of one model and precision share
    what they can; what is built is in the cache, so that a run that was ended goes on.

    Example: tandem build-all matrix.toml --workers 4
    """

    matrix: Path = argument(type=FILE)
    workers: str = option(
        "Build in so many processes, or on the workers of a Dask scheduler.",
        default="1", metavar="N|tcp://HOST:PORT",
    )  # fmt: skip
    html: Path | None = html_option("the table of engines")
    as_json: bool = json_option()


build_all = command(BuildAll, "build_all:build_all", name="build-all")
