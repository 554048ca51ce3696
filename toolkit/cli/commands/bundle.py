"""`tandem bundle`: pack engines, their pipeline and labels into one file, and look into it."""

from dataclasses import dataclass
from pathlib import Path

import click

from device.update.admission import REQUIREMENTS
from toolkit.cli.command import (
    FILE,
    FOLDER,
    NEW_FILE,
    argument,
    command,
    group,
    json_option,
    option,
    part,
)
from toolkit.cli.options.fleet import RegistryOptions

CREATE = "create"
LOG_FLAGS = frozenset({"-v", "-vv", "-q", "--verbose", "--quiet"})


class _Bundle(click.Group):
    """Subcommands; a first word that is none of them is an engine, and a bundle is written."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        word = _first_word(args)
        if word is not None and word not in (*self.commands, *ctx.help_option_names):
            args = [CREATE, *args]
        return super().parse_args(ctx, args)


def _first_word(args: list[str]) -> str | None:
    """Return the first argument that is no option of the log, which every command takes."""
    rest = iter(args)
    for word in rest:
        if word == "--log":
            next(rest, None)
        elif word not in LOG_FLAGS:
            return word
    return None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a bundle says of itself."""

    metrics: tuple[str, ...] = option(
        "A figure that was measured of the model, for gates of rollouts; may be given again.",
        "--metric", metavar="NAME=NUMBER",
    )  # fmt: skip
    requires: tuple[str, ...] = option(
        f"The least that a board must have ({', '.join(REQUIREMENTS)}); may be given again.",
        metavar="NAME=LEAST",
    )
    made_of: tuple[str, ...] = option(
        "Note the SHA-256 of the model, data or table that the engine was made of.",
        metavar="KIND=FILE",
    )
    licence: str = option(
        "The licence of the release.  [default: as the models' metadata say]",
        "--license", "--licence", default="", metavar="SPDX",
    )  # fmt: skip
    min_version_floor: str = option(
        "Once this release is live on a device, it takes no version below this one.", default=""
    )


@dataclass(frozen=True, slots=True)
class Create:
    """Write a bundle: engines with their pipeline and labels, ready for `tandem deploy`.

    The inputs and outputs of each engine must fit the pipeline and the labels. An ENGINE is of the
    [[models]] that name a file called like it, or of the model NAME; what is not given is the file
    that the pipeline names. GPU segments leave their form for any CPU behind, unless --portable
    keeps it. The same files give the same bytes. With --payload the bundle holds a service: the
    program of another runtime, with its files.

    Examples: tandem bundle person.engine --pipeline pipeline.toml --labels labels.txt -o
    person.bundle; tandem bundle --pipeline yard.toml -o yard.bundle
    """

    engines: tuple[str, ...] = argument("[ENGINE|NAME=ENGINE]...", nargs=-1, required=False)
    pipeline: Path = option("The pipeline.toml to run.", type=FILE, required=True)
    labels: tuple[str, ...] = option(
        "The class names, one a line; may be given again.  [default: as the pipeline says]",
        metavar="FILE|NAME=FILE",
    )
    name: str | None = option(
        "The release's name.  [default: the engine's file name; of several, the pipeline's]"
    )
    version: str = option("The release's version.", default="0.1.0")
    output: Path = option("The bundle to write.", "-o", "--output", type=NEW_FILE, required=True)
    payload: Path | None = option(
        'The files of a pipeline of kind "service".',
        type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
    )  # fmt: skip
    profile: str | None = option("The profile of the boards that --payload is for.")
    portable: bool = option(
        "Keep the GPU segments' form for any CPU, to run the bundle elsewhere, too."
    )
    golden: str | None = option(
        "Put N random inputs, or the pictures in DIR, into the bundle with the engine's outputs: a "
        "device compares its own with them before a trial.", metavar="N|DIR",
    )  # fmt: skip
    facts: Facts = part()
    as_json: bool = json_option("Print what was written as JSON.")


@dataclass(frozen=True, slots=True)
class Agent:
    """Write a release of the agent itself: the wheels of a folder, for the boards that fit them.

    Which Python, machine and glibc a board needs is what the names of the wheels say. A board
    takes it by `tandem-agent control self-update`.

    Example: tandem bundle agent --wheels wheels -o agent.bundle
    """

    wheels: Path = option(
        "Tandem's wheel, and those of all that a board's system lacks.", type=FOLDER, required=True
    )
    output: Path = option("The bundle to write.", "-o", "--output", type=NEW_FILE, required=True)
    version: str = option("The version.  [default: that of Tandem's wheel]", default="")
    min_l4t: str = option("The oldest L4T that it runs on.", default="")
    below_l4t: str = option("The first L4T that it does not run on.", default="")
    as_json: bool = json_option("Print what was written as JSON.")


@dataclass(frozen=True, slots=True)
class Inspect:
    """Show what BUNDLE holds and says of itself; every hash is checked first.

    Of a bundle in a signed repository it says who has signed it; `tandem bundle verify` checks
    that.

    Example: tandem bundle inspect robot.bundle
    """

    bundle: Path = argument(type=FILE)
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Verify:
    """Check BUNDLE: every hash, its engines, pipeline and labels; with --trust the signature.

    Exit status: 0, or 1 if a check failed, or 2 if it could not be checked.

    Example: tandem bundle verify robot.bundle --trust fleet/trust --repository fleet/repository
    """

    bundle: Path = argument()
    trust: Path | None = option(
        "Check the fleet's signature, too: by a root.json, or the folder with it.",
        type=click.Path(exists=True, path_type=Path), metavar="ROOT",
    )  # fmt: skip
    repository: str | None = option(
        "Where the signed metadata are.  [default: where the bundle lies]", metavar="DIR|URL"
    )
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Diff:
    """Say what changed from bundle A to bundle B, and what a board that runs A fetches for B.

    Settings of the pipeline, labels, what is said of the release, and the engines tensor by
    tensor. Exit status: 0 if they are the same, 1 if not, or 2 if they could not be compared.

    Example: tandem bundle diff robot-1.bundle robot-2.bundle
    """

    a: Path = argument()
    b: Path = argument()
    every: bool = option("List equal parts, too.", "--all")
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Sbom:
    """Print the bill of materials of BUNDLE: CycloneDX 1.6 in JSON.

    It is the one in the bundle; for a bundle of an earlier version one is made.

    Example: tandem bundle sbom robot.bundle
    """

    bundle: Path = argument(type=FILE)


@dataclass(frozen=True, slots=True)
class Push:
    """Push BUNDLE to a registry. It is sent in pieces; those that are there already are not.

    User and password come from TANDEM_REGISTRY_USER and TANDEM_REGISTRY_PASSWORD, or from what
    `docker login` has stored.

    Example: tandem bundle push robot.bundle oci://registry.example.com/robots/robot:1.0.0
    """

    bundle: Path = argument(type=FILE)
    reference: str = argument("oci://HOST/NAME:TAG")
    registry: RegistryOptions = part()
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Pull:
    """Pull a bundle from a registry, and check every byte of it.

    What has come stays in a file beside OUTPUT that ends in .part; the next pull goes on with it.

    Example: tandem bundle pull oci://registry.example.com/robots/robot:1.0.0 -o robot.bundle
    """

    reference: str = argument("oci://HOST/NAME:TAG|@DIGEST")
    output: Path = option("The bundle to write.", "-o", "--output", type=NEW_FILE, required=True)
    registry: RegistryOptions = part()
    as_json: bool = json_option("Print JSON.")


bundle = group(
    "bundle",
    """Write a bundle, look into it, compare two.

    `tandem bundle ENGINE ...` is short for `tandem bundle create ENGINE ...`.

    Examples: tandem bundle person.engine --pipeline pipeline.toml --labels labels.txt
    -o person.bundle; tandem bundle --pipeline yard.toml -o yard.bundle
    """,
    [
        command(options, f"bundle:{options.__name__.lower()}")
        for options in (Create, Agent, Inspect, Verify, Diff, Sbom, Push, Pull)
    ],
    _Bundle,
)
