"""[update] of agent.toml: how releases are fetched and tried."""

from typing import Annotated

import msgspec
from msgspec import Meta

from device.update.versions import VERSION_PATTERN

Seconds = Annotated[float, Meta(gt=0.0, le=86400.0)]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table: frozen, and unknown keys are refused."""


class UpdateTable(Table, frozen=True, kw_only=True):
    """[update]: how a release is fetched and tried.

    `trial_timeout_s`: a release on trial that gives no frame for so long fails, or is postponed if
    its source is away. One during which the broker is away for `broker_timeout_s`, and was not
    before, gives way to the release before. It is live after it has run for `confirm_after_s`
    without a break, with `confirm_frames` frames, of which no more than `max_error_rate` failed,
    while the broker is reachable. A live release that
    crashes `max_crashes` times within `crash_window_s` is rolled back. `window_chunks`: the most
    chunks asked for at once. `max_bytes_per_s`: so much is downloaded a second; None: no limit.
    `min_version`: the oldest version that is taken, over every transport; empty: any.
    In shadow mode at least `shadow_frames` live frames are compared, at most `shadow_max_hz` a
    second. `sources`: where releases are fetched, in this order: "mqtt", the URL of a folder (http,
    https, file) or a path. `ca`: a file with CAs that vouch for https sources, besides the
    system's. `stop_grace_s`: a pipeline that is stopped has so long to end.
    """

    trial_timeout_s: Seconds = 30.0
    broker_timeout_s: Seconds = 300.0
    confirm_after_s: Seconds = 10.0
    confirm_frames: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    max_error_rate: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    max_crashes: Annotated[int, Meta(ge=1, le=1000)] = 5
    crash_window_s: Seconds = 300.0  # several times what a trial lets pass
    shadow_frames: Annotated[int, Meta(ge=1, le=1_000_000)] = 30
    shadow_max_hz: Annotated[float, Meta(gt=0.0, le=1000.0)] = 10.0
    window_chunks: Annotated[int, Meta(ge=1, le=64)] = 64
    max_bytes_per_s: Annotated[int, Meta(ge=1024)] | None = None
    sources: Annotated[tuple[str, ...], Meta(min_length=1, max_length=8)] = ("mqtt",)
    ca: Annotated[str, Meta(min_length=1)] | None = None
    stop_grace_s: Seconds = 5.0
    min_version: Annotated[str, Meta(max_length=64, pattern=VERSION_PATTERN)] = ""
