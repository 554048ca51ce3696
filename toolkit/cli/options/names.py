"""Names that a shell completes: profiles, their power modes, calibration methods."""

import click

import configs
from device.errors import TandemError
from toolkit.cli.options.choices import AUTO, CALIBRATION_METHODS


def complete_profile(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the shipped profiles that begin so."""
    names = sorted(path.stem for path in (configs.ROOT / "profiles").glob("*.toml"))
    return [name for name in names if name.startswith(incomplete)]


def complete_power_mode(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the power modes of the profile on the command line, or of every profile."""
    from device.profile import list_profiles, load_profile

    name = ctx.params.get("profile")
    try:
        profiles = (load_profile(name),) if name else list_profiles()
    except TandemError:
        return []  # the command will say it
    modes = {mode.name for profile in profiles for mode in profile.power_modes}
    return sorted(mode for mode in modes if mode.casefold().startswith(incomplete.casefold()))


def complete_method(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the calibration methods that begin so."""
    return [name for name in (AUTO, *CALIBRATION_METHODS) if name.startswith(incomplete)]
