"""The process that runs a new release in the shadow of the one that is live.

The child is `python -m pipelines.shadow`, with the lowest priority and a memory limit of its own.
What it says and that it ended arrive as events.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from device.protocol.documents import InstallPolicy
from device.protocol.messages import Failure, Shadow, decode_message
from device.start.child_process import ChildExit, ChildLimits, ChildProcess, OneChild, echo
from device.start.command import module_command
from device.start.memory_watch import available_bytes

TAP = "shadow.sock"  # in the state folder; the running pipeline listens there
MEMORY_SHARE = 0.75  # of what is free: the running release must not run out of it
START_S = 180.0  # for the engine to load at the lowest priority
_COMMAND = module_command("pipelines.shadow")


@dataclass(frozen=True, slots=True)
class ShadowProgress:
    """How far the comparison is."""

    run: int
    message: Shadow


@dataclass(frozen=True, slots=True)
class ShadowEnded:
    """The child has ended. `result` None: without one, `problem` says how.

    `passing`: the system is to blame, and another try may go well.
    """

    run: int
    result: Shadow | None
    problem: str = ""
    passing: bool = False


ShadowEvent = ShadowProgress | ShadowEnded


@dataclass(frozen=True, slots=True)
class ShadowLimits:
    """See `pipelines.shadow.compare.Limits`."""

    seconds: float
    frames: int
    timeout_s: float
    max_hz: float

    @property
    def longest_s(self) -> float:
        """The longest that a child may take that keeps its limits: it waits as long for the first
        frame as it looks at frames from then on."""
        return START_S + 2.0 * (self.seconds + self.timeout_s)


def shadow_refusal(event: ShadowEnded, policy: InstallPolicy, min_frames: int) -> str | None:
    """Return why the release must not be tried, None if it may."""
    result = event.result
    if result is None:
        return f"it cannot run beside the live release: {event.problem}"
    if result.frames < min_frames:
        return (
            f"{result.frames} live frames were compared with the live release in "
            f"{policy.shadow_s:g} s (shadow_s), at least {min_frames} must be (shadow_frames): "
            "look whether the pipeline has frames"
        )
    least = policy.min_shadow_agreement
    if least is not None and not result.counted:
        return (
            f"on {result.frames} live frames neither release saw anything, so that nothing shows "
            f"whether {least:.2%} agree (min_shadow_agreement): deploy it again while the camera "
            "has something to see"
        )
    if least is not None and result.agreement < least:
        return (
            f"on {result.frames} live frames {result.agreement:.2%} of {result.counted} results "
            f"agree with the live release, at least {least:.2%} must (min_shadow_agreement)"
        )
    return None


class ShadowProcess(OneChild):
    """The child that runs a release in shadow; see `OneChild`."""

    def __init__(
        self,
        put: Callable[[ShadowEvent], None],
        state_dir: Path,
        profile: str,
        *,
        plans: Path | None = None,
        command: tuple[str, ...] = _COMMAND,
    ) -> None:
        """`plans`: where finished segments are kept."""
        super().__init__()
        self._put = put
        self._tap = state_dir / TAP
        self._profile = profile
        self._plans = plans
        self._command = command

    def start(self, folder: Path, limits: ShadowLimits) -> None:
        """Compare the release in a slot; a child that cannot be started ends at once."""
        self.stop()
        command = (
            *self._command, "--bundle", str(folder), "--profile", self._profile,
            "--tap", str(self._tap), "--seconds", f"{limits.seconds:g}",
            "--frames", str(limits.frames), "--timeout", f"{limits.timeout_s:g}",
            "--max-hz", f"{limits.max_hz:g}",
        )  # fmt: skip
        try:
            self._child = self._start(command, limits)
        except OSError as error:
            self._put(ShadowEnded(self._run, None, str(error.strerror), passing=True))

    def _start(self, command: tuple[str, ...], limits: ShadowLimits) -> ChildProcess:
        run, result, failure = self._run, None, ""

        def on_line(line: bytes) -> None:
            nonlocal result, failure
            message = decode_message(line)
            if isinstance(message, Failure):
                failure = failure or message.message
            elif isinstance(message, Shadow):
                result = message if message.done else None
                self._put(ShadowProgress(run, message))

        def on_exit(exit_: ChildExit) -> None:
            tail = " | ".join(exit_.tail[-3:])
            problem = failure or exit_.cause or f"it ended with status {exit_.status}: {tail}"
            self._put(ShadowEnded(run, result, "" if result is not None else problem))

        return ChildProcess(
            command, on_line, on_exit, limits=_limits(limits), on_stderr=echo,
            environment={} if self._plans is None else {"TANDEM_PLANS": str(self._plans)},
        )  # fmt: skip


def _limits(limits: ShadowLimits) -> ChildLimits:
    memory_bytes = int(available_bytes() * MEMORY_SHARE)
    return ChildLimits(
        seconds=limits.longest_s,
        too_long=f"it took longer than {limits.longest_s:g} s",
        memory_bytes=memory_bytes,
        too_much=lambda used_bytes: (
            f"it held {used_bytes >> 20} MiB of memory beside the running release and may hold "
            f"{memory_bytes >> 20} MiB, {MEMORY_SHARE:.0%} of what was free"
        ),
    )
