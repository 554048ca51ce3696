"""The pages of the site: a row for each."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.store.accounts import Role
from toolkit.fleet.store.database import Database
from toolkit.fleet.web.frame import View
from toolkit.fleet.web.pages.audit import draw_audit
from toolkit.fleet.web.pages.device import draw_decommission, draw_device
from toolkit.fleet.web.pages.devices import draw_bulk_labels, draw_devices
from toolkit.fleet.web.pages.new_rollout import draw_new_rollout
from toolkit.fleet.web.pages.overview import draw_overview
from toolkit.fleet.web.pages.release import draw_release
from toolkit.fleet.web.pages.rollouts import draw_order, draw_rollout, draw_rollouts
from toolkit.fleet.web.visit import Visit


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its path with {PARAMETERS}, who may read it, and what draws it. `is_live`: it has a
    live part; what is planned is not planned anew with each change."""

    path: str
    role: Role
    draw: Callable[[Database, Fleet, Visit], View]
    is_live: bool = True

    @property
    def pattern(self) -> re.Pattern[str]:
        """The path as a pattern, a group for each parameter."""
        return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.path))


PAGES: tuple[Page, ...] = (
    Page("/", "viewer", draw_overview),
    Page("/devices", "viewer", draw_devices),
    Page("/devices/{device}", "viewer", draw_device),
    Page("/devices/{device}/decommission", "operator", draw_decommission, is_live=False),
    Page("/bulk/labels", "operator", draw_bulk_labels, is_live=False),
    Page("/rollouts", "viewer", draw_rollouts),
    Page("/rollouts/new", "operator", draw_new_rollout, is_live=False),
    Page("/rollouts/{number}", "viewer", draw_rollout),
    Page("/rollouts/{number}/{order}", "operator", draw_order, is_live=False),
    Page("/releases/{sha256}", "viewer", draw_release),
    Page("/audit", "viewer", draw_audit),
)
