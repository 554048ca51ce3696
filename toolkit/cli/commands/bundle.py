"""`tandem bundle`: pack an engine, its pipeline and its labels into one file, and look into it."""

from pathlib import Path

import click
import msgspec

from device.engine.manifest import UNCALIBRATED
from device.update.admission import REQUIREMENTS
from toolkit.cli.commands.bundle_contents import diff, inspect, verify
from toolkit.cli.commands.bundle_registry import pull, push
from toolkit.cli.log import warn

EPILOG = (
    "Example: tandem bundle person.engine --pipeline pipeline.toml --labels labels.txt "
    "-o person.bundle"
)
CREATE = "create"
LOG_FLAGS = frozenset({"-v", "-vv", "-q", "--verbose", "--quiet"})
INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)


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


@click.group(cls=_Bundle, epilog=EPILOG)
def bundle() -> None:
    """Write a bundle, look into it, compare two.

    `tandem bundle ENGINE ...` is short for `tandem bundle create ENGINE ...`.
    """


@bundle.command(CREATE, epilog=EPILOG)
@click.argument("engine", type=INPUT)
@click.option("--pipeline", required=True, type=INPUT, help="The pipeline.toml to run.")
@click.option("--labels", required=True, type=INPUT, help="The class names, one a line.")
@click.option("--name", help="The release's name.  [default: the engine's file name]")
@click.option("--version", default="0.1.0", show_default=True, help="The release's version.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The bundle to write.",
)
@click.option(
    "--portable",
    is_flag=True,
    help="Keep the GPU segments' form for any CPU, to run the bundle elsewhere, too.",
)
@click.option(
    "--golden",
    metavar="N|DIR",
    help="Put N random inputs, or the pictures in DIR, into the bundle with the engine's outputs: "
    "a device compares its own with them before a trial.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME=NUMBER",
    help="A figure that was measured of the model, for gates of rollouts; may be given again.",
)
@click.option(
    "--requires",
    multiple=True,
    metavar="NAME=LEAST",
    help=f"The least that a board must have ({', '.join(REQUIREMENTS)}); may be given again.",
)
@click.option(
    "--made-of",
    multiple=True,
    metavar="KIND=FILE",
    help="Note the SHA-256 of the model, data or table that the engine was made of.",
)
@click.option("--licence", default="", help="The licence of the model.")
@click.option(
    "--min-version-floor",
    default="",
    help="Once this release is live on a device, it takes no version below this one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def create(
    engine: Path,
    pipeline: Path,
    labels: Path,
    name: str | None,
    version: str,
    output: Path,
    portable: bool,
    golden: str | None,
    metrics: tuple[str, ...],
    requires: tuple[str, ...],
    made_of: tuple[str, ...],
    licence: str,
    min_version_floor: str,
    as_json: bool,
) -> None:
    """Write a bundle: ENGINE with its pipeline and labels, ready for `tandem deploy`.

    The engine's input and outputs must fit the pipeline and the labels. GPU segments leave their
    form for any CPU behind, unless --portable keeps it. The same files give the same bytes.
    """
    from toolkit.fleet.bundle_facts import bundle_facts, golden_source
    from toolkit.fleet.pack import pack_bundle  # numpy is not needed to show the help

    facts = bundle_facts(
        metrics=metrics,
        requires=requires,
        made_of=made_of,
        licence=licence,
        min_version_floor=min_version_floor,
    )
    packed = pack_bundle(
        output,
        engine=engine,
        pipeline=pipeline,
        labels=labels,
        name=name or engine.stem,
        version=version,
        portable=portable,
        golden=None if golden is None else golden_source(golden),
        facts=facts,
    )
    info = packed.info
    if packed.uncalibrated:
        warn(UNCALIBRATED, "red")
    if packed.warning is not None:
        warn(packed.warning)
    if as_json:
        click.echo(msgspec.json.encode(info).decode())
        return
    size = output.stat().st_size
    click.echo(
        f"wrote {output}: {info.name} {info.version} for {info.profile}, {size / 1e6:.1f} MB"
    )
    if packed.left_out_bytes:
        click.echo(
            f"left out the GPU segments' form for any CPU, {packed.left_out_bytes / 1e6:.1f} MB; "
            "--portable keeps it"
        )


for _command in (inspect, verify, diff, push, pull):
    bundle.add_command(_command)
