"""`tandem bundle`: pack engines, their pipeline and labels into one file, and look into it."""

from pathlib import Path

import click
import msgspec

from device.engine.manifest import UNCALIBRATED
from device.update.admission import REQUIREMENTS
from toolkit.cli.commands.bundle_contents import diff, inspect, sbom, verify
from toolkit.cli.commands.bundle_registry import pull, push
from toolkit.cli.log import warn

EPILOG = (
    "Examples: tandem bundle person.engine --pipeline pipeline.toml --labels labels.txt "
    "-o person.bundle; tandem bundle --pipeline yard.toml -o yard.bundle"
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
@click.argument("engines", nargs=-1, metavar="[ENGINE|NAME=ENGINE]...")
@click.option("--pipeline", required=True, type=INPUT, help="The pipeline.toml to run.")
@click.option(
    "--labels",
    multiple=True,
    metavar="FILE|NAME=FILE",
    help="The class names, one a line; may be given again.  [default: as the pipeline says]",
)
@click.option(
    "--name",
    help="The release's name.  [default: the engine's file name; of several, the pipeline's]",
)
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
@click.option(
    "--license",
    "--licence",
    "licence",
    default="",
    metavar="SPDX",
    help="The licence of the release.  [default: as the models' metadata say]",
)
@click.option(
    "--min-version-floor",
    default="",
    help="Once this release is live on a device, it takes no version below this one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def create(
    engines: tuple[str, ...],
    pipeline: Path,
    labels: tuple[str, ...],
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
    """Write a bundle: engines with their pipeline and labels, ready for `tandem deploy`.

    The inputs and outputs of each engine must fit the pipeline and the labels. An ENGINE is of the
    [[models]] that name a file called like it, or of the model NAME; what is not given is the file
    that the pipeline names. GPU segments leave their form for any CPU behind, unless --portable
    keeps it. The same files give the same bytes.
    """
    from pipelines.config import load_pipeline
    from toolkit.fleet.bundles.create import pack_bundle  # numpy is not needed to show the help
    from toolkit.fleet.bundles.facts import bundle_facts, golden_source
    from toolkit.fleet.bundles.model_files import model_files

    config = load_pipeline(pipeline)
    files = model_files(config, pipeline.parent, engines, labels)
    facts = bundle_facts(
        metrics=metrics,
        requires=requires,
        made_of=made_of,
        licence=licence,
        min_version_floor=min_version_floor,
    )
    packed = pack_bundle(
        output,
        pipeline=pipeline,
        files=files,
        name=name or (config.name if config.models[1:] else next(iter(files.values())).engine.stem),
        version=version,
        portable=portable,
        golden=None if golden is None else golden_source(golden),
        facts=facts,
    )
    info = packed.info
    for model in packed.uncalibrated:
        warn(f"{model}: {UNCALIBRATED}" if info.models else UNCALIBRATED, "red")
    for warning in packed.warnings:
        warn(warning)
    if as_json:
        click.echo(msgspec.json.encode(info).decode())
        return
    size = output.stat().st_size
    models = f", models {', '.join(files)}" if info.models else ""
    click.echo(
        f"wrote {output}: {info.name} {info.version} for {info.profile}{models}, "
        f"{size / 1e6:.1f} MB"
    )
    if packed.left_out_bytes:
        click.echo(
            f"left out the GPU segments' form for any CPU, {packed.left_out_bytes / 1e6:.1f} MB; "
            "--portable keeps it"
        )


for _command in (inspect, verify, diff, sbom, push, pull):
    bundle.add_command(_command)
