"""Write bundles, look into them, compare two, and keep them in registries."""

import tempfile
from pathlib import Path

import click
import msgspec
from rich.console import Console, RenderableType

from device.engine.manifest import UNCALIBRATED
from device.update.bundle import BOM, BundleFacts, check_bundle, read_bundle_info
from pipelines.config import load_pipeline
from toolkit.cli.actions.outputs import print_result, status_2
from toolkit.cli.actions.registry import open_registry
from toolkit.cli.bundle_text import agent_text, bundle_table, checks_table, difference_table
from toolkit.cli.commands.bundle import (
    Agent,
    Create,
    Diff,
    Facts,
    Inspect,
    Pull,
    Push,
    Sbom,
    Verify,
)
from toolkit.cli.log import warn
from toolkit.cli.progress import progress_bar
from toolkit.errors import NotComparedError
from toolkit.fleet.bundles.agent import pack_agent
from toolkit.fleet.bundles.create import pack_bundle
from toolkit.fleet.bundles.diff import compare_bundles
from toolkit.fleet.bundles.facts import bundle_facts, golden_source, hash_of
from toolkit.fleet.bundles.inspection import describe
from toolkit.fleet.bundles.model_files import model_files
from toolkit.fleet.bundles.payload import pack_service
from toolkit.fleet.bundles.sbom import bill_of_materials
from toolkit.fleet.bundles.signature import repository_of
from toolkit.fleet.bundles.unpacked import unpacked
from toolkit.fleet.bundles.verify import check_signature, verify_contents
from toolkit.fleet.registry import transfer


def create(options: Create) -> None:
    """Write a bundle and print what is in it. Raises TandemError."""
    pipeline = options.pipeline
    config = load_pipeline(pipeline)
    if options.payload is not None or config.kind == "service":
        _create_service(options)
        return
    if options.profile is not None:
        raise click.UsageError("--profile is for --payload: engines know their profile.")
    files = model_files(config, pipeline.parent, options.engines, options.labels)
    own_name = config.name if config.models[1:] else next(iter(files.values())).engine.stem
    packed = pack_bundle(
        options.output,
        pipeline=pipeline,
        files=files,
        name=options.name or own_name,
        version=options.version,
        portable=options.portable,
        golden=None if options.golden is None else golden_source(options.golden),
        facts=_facts(options.facts),
    )
    for model in packed.uncalibrated:
        warn(f"{model}: {UNCALIBRATED}" if packed.info.models else UNCALIBRATED, "red")
    for warning in packed.warnings:
        warn(warning)
    info, size = packed.info, options.output.stat().st_size
    models = f", models {', '.join(files)}" if info.models else ""
    text = (
        f"wrote {options.output}: {info.name} {info.version} for {info.profile}{models}, "
        f"{size / 1e6:.1f} MB"
    )
    if packed.left_out_bytes:
        text += (
            f"\nleft out the GPU segments' form for any CPU, {packed.left_out_bytes / 1e6:.1f} MB; "
            "--portable keeps it"
        )
    print_result(info, text, as_json=options.as_json)


def _create_service(options: Create) -> None:
    payload, profile = options.payload, options.profile
    if payload is None or profile is None:
        raise click.UsageError(
            f'{options.pipeline} is of kind "service": give --payload DIR and --profile NAME.'
        )
    if options.engines or options.labels or options.golden or options.portable:
        raise click.UsageError("A service has no engines, --labels, --golden and --portable.")
    info = pack_service(
        options.output,
        pipeline=options.pipeline,
        payload=payload,
        profile=profile,
        name=options.name,
        version=options.version,
        facts=_facts(options.facts),
    )
    text = (
        f"wrote {options.output}: {info.name} {info.version} for {info.profile}, a service of "
        f"{len(info.files)} files, {options.output.stat().st_size / 1e6:.1f} MB"
    )
    print_result(info, text, as_json=options.as_json)


def _facts(facts: Facts) -> BundleFacts:
    return bundle_facts(
        metrics=facts.metrics,
        requires=facts.requires,
        made_of=facts.made_of,
        licence=facts.licence,
        min_version_floor=facts.min_version_floor,
    )


def agent(options: Agent) -> None:
    """Write a release of the agent and print which boards take it. Raises TandemError."""
    info = pack_agent(
        options.output,
        options.wheels,
        options.version,
        min_l4t=options.min_l4t,
        below_l4t=options.below_l4t,
    )
    size = options.output.stat().st_size
    text = f"wrote {options.output}: {agent_text(info)}, {size / 1e6:.1f} MB"
    print_result(info, text, as_json=options.as_json)


def inspect(options: Inspect) -> None:
    """Print what a bundle holds. Raises TandemError."""
    if read_bundle_info(options.bundle).agent is not None:
        info, _ = check_bundle(options.bundle)
        wheels = "".join(f"\n{file.sha256}  {file.name}" for file in info.files)
        print_result(info, f"{agent_text(info)}{wheels}", as_json=options.as_json)
        return
    with unpacked(options.bundle) as bundle:
        view = describe(bundle)
    _print(view, None if options.as_json else bundle_table(view))


def verify(options: Verify) -> None:
    """Print the checks of a bundle; exits with 1 if one failed. Raises NotComparedError."""
    bundle, trust = options.bundle, options.trust
    with status_2():
        _need_file(bundle)
        place = options.repository or repository_of(bundle)
        if options.repository is not None and trust is None:
            raise click.UsageError("--repository is where the signature is; give --trust, too.")
        if trust is not None and place is None:
            raise click.UsageError(
                f"{bundle} lies in no signed repository: name it with --repository."
            )
        with tempfile.TemporaryDirectory(prefix="tandem-bundle-") as folder:
            checks = verify_contents(bundle, Path(folder) / "bundle")
        if trust is not None:
            checks += (check_signature(bundle, trust, str(place)),)
    _print(checks, None if options.as_json else checks_table(checks))
    raise click.exceptions.Exit(0 if all(check.passed for check in checks) else 1)


def diff(options: Diff) -> None:
    """Print what differs; exits with 1 if something does. Raises NotComparedError."""
    with status_2():
        for path in (options.a, options.b):
            _need_file(path)
        with unpacked(options.a) as before, unpacked(options.b) as after:
            difference = compare_bundles(before, after)
    table = None if options.as_json else difference_table(difference, every=options.every)
    _print(difference, table)
    raise click.exceptions.Exit(0 if difference.same else 1)


def sbom(options: Sbom) -> None:
    """Print the bill of materials of a bundle. Raises TandemError."""
    with unpacked(options.bundle) as bundle:
        path = bundle.folder / BOM
        if path.exists():
            text = path.read_bytes()
        else:
            manifests = {name: engine.manifest for name, engine in bundle.engines.items()}
            text = bill_of_materials(bundle.info, manifests)
    click.echo(text.decode(), nl=False)


def push(options: Push) -> None:
    """Push a bundle to a registry. Raises TandemError."""
    with (
        open_registry(options.reference, options.registry) as client,
        progress_bar(options.bundle.name) as report,
    ):
        pushed = transfer.push(client, options.bundle, report)
    sent = f"{pushed.sent_bytes / 1e6:.1f} MB" if pushed.sent_bytes else "nothing, it was there"
    text = f"pushed {pushed.reference}\n{pushed.digest}\nsent {sent}"
    print_result(pushed, text, as_json=options.as_json)


def pull(options: Pull) -> None:
    """Pull a bundle from a registry. Raises TandemError."""
    output = options.output
    with (
        open_registry(options.reference, options.registry) as client,
        progress_bar(output.name) as report,
    ):
        resolved = transfer.resolve(client)
        transfer.pull(client, resolved, output, report)
        named = client.reference.at(resolved.digest)
    document = {"reference": str(named), "sha256": hash_of(output), "bytes": resolved.bytes}
    text = f"wrote {output}, {resolved.bytes / 1e6:.1f} MB, from {named}"
    print_result(document, text, as_json=options.as_json)


def _need_file(path: Path) -> None:
    if not path.is_file():
        raise NotComparedError(f"there is no bundle {path}: `tandem bundle create` writes one")


def _print(value: object, table: RenderableType | None) -> None:
    """Print a value as a table, or else as JSON."""
    if table is None:
        click.echo(msgspec.json.encode(value).decode())
    else:
        Console().print(table)
