"""`tandem cache`: what builds have made before, here and in a registry."""

from dataclasses import dataclass

import click

from toolkit.cli.command import argument, command, group, json_option, option, part
from toolkit.cli.options.fleet import RegistryOptions
from toolkit.cli.options.model import parse_size


@dataclass(frozen=True, slots=True)
class Info:
    """Say where the cache is and what it holds.

    Example: tandem cache info
    """

    as_json: bool = json_option()


@dataclass(frozen=True, slots=True)
class Trim:
    """Remove what was used longest ago, until the rest fits.

    Example: tandem cache trim --to 10GiB
    """

    to: int = option("Most that may stay.", required=True, parse=parse_size, metavar="SIZE")
    as_json: bool = json_option()


@dataclass(frozen=True, slots=True)
class Push:
    """Push the cache to a registry, with what is there under the tag already.

    Example: tandem cache push oci://registry.example.com/team/cache:main
    """

    reference: str = argument("oci://HOST/NAME:TAG")
    registry: RegistryOptions = part()
    as_json: bool = json_option()


@dataclass(frozen=True, slots=True)
class Pull:
    """Pull a cache from a registry; what is here already is not sent.

    Example: tandem cache pull oci://registry.example.com/team/cache:main
    """

    reference: str = argument("oci://HOST/NAME:TAG")
    registry: RegistryOptions = part()
    as_json: bool = json_option()


cache: click.Group = group(
    "cache",
    """Look after the cache of kernels, calibration shards and engines.

    Example: tandem cache info""",
    [
        command(Info, "cache:info"),
        command(Trim, "cache:trim"),
        command(Push, "cache:push"),
        command(Pull, "cache:pull"),
    ],
)
