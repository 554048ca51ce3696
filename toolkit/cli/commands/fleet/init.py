"""`tandem fleet init`: make the folder of a fleet."""

from pathlib import Path

import click
import msgspec

from toolkit.cli.options.fleet import json_option


@click.command(epilog="Example: tandem fleet init fleet --root-keys 3 --threshold 2")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--name", help="The fleet's name.  [default: that of the folder]")
@click.option(
    "--root-keys",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    help="How many root keys there are; they sign all other keys.",
)
@click.option(
    "--threshold",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    help="How many of the root keys must sign.",
)
@click.option("--broker", metavar="[mosquitto|rabbitmq][@]HOST:PORT",
    help="The software of the fleet's MQTT broker, where devices find it, or both: rabbitmq, "
    "192.168.1.10:8883, rabbitmq@192.168.1.10.  [default: mosquitto@127.0.0.1:8883]")  # fmt: skip
@click.option("--host", "hosts", multiple=True, metavar="NAME",
    help="Another name or address of the broker, for its certificate; repeatable.")  # fmt: skip
@json_option
def init(
    folder: Path,
    name: str | None,
    root_keys: int,
    threshold: int,
    broker: str | None,
    hosts: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make FOLDER: keys, a repository without releases, certificates, the broker's configuration,
    and what every board gets.

    FOLDER/keys is encrypted with the passphrase in TANDEM_FLEET_PASSPHRASE, if there is one. Copy
    FOLDER/trust to each board, and keep FOLDER/keys to yourself.
    """
    from toolkit.fleet.brokers.software import SOFTWARE
    from toolkit.fleet.folder import BROKER, make_fleet

    settings = make_fleet(
        folder,
        name=name or folder.resolve().name,
        broker=broker,
        hosts=hosts,
        root_keys=root_keys,
        threshold=threshold,
    )
    if as_json:
        click.echo(msgspec.json.encode({"folder": str(folder), **msgspec.to_builtins(settings)}))
        return
    run = SOFTWARE[settings.broker.software].run.format(folder=folder.resolve() / BROKER)
    click.echo(
        f"made the fleet {settings.name} in {folder}: copy {folder / 'trust'} to each board, beside"
        f" its agent.toml, and keep {folder / 'keys'} to yourself. The broker runs with `{run}`"
    )
