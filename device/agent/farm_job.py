"""A job of a farm: its kit comes over MQTT, then a child works through it.

It is the least of what a board does: a release, a pipeline or another command ends it.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from device.agent.downloads import Download, download_problem
from device.agent.operations import MAX_RESULT_BYTES, Job
from device.agent.task_process import TaskEnded, start_task
from device.errors import TandemError
from device.protocol.documents import BlobGet, Phase, PipelineStatus
from device.start.memory_watch import default_limit_bytes

FOLDER = "farm"  # of the state folder
WORK = "farm-work"  # the same: what a job's child writes, the kit unpacked and temporary files
LABEL, YES = "farm", "yes"
FETCH_S = 120.0  # without a byte of the kit for so long a job has failed
WORKING: tuple[Phase, ...] = ("verifying", "downloading", "staging", "trial")
IDLE: tuple[PipelineStatus, ...] = ("stopped", "failed")
ANOTHER = "another command was given to this board, and a job waits for none: give it elsewhere"


def no_job(labels: Mapping[str, str], phase: Phase, pipeline: PipelineStatus) -> str:
    """Return why a board does no job of a farm now, "" if it does."""
    if labels.get(LABEL) != YES:
        return f'this board is in no farm: write {LABEL} = "{YES}" into [labels] of its agent.toml'
    if phase in WORKING:
        return f"a release is being installed on this board (phase {phase}): try again later"
    if pipeline not in IDLE:
        return (
            "its pipeline is running, which a job would disturb and which would falsify times: "
            "stop it with `tandem fleet device run DEVICE pipeline state=stopped`"
        )
    return ""


class FarmJob:
    """No job, or the one of the current command. Start and advance it from the main thread."""

    def __init__(
        self,
        state_dir: Path,
        window_chunks: int,
        *,
        ask: Callable[[BlobGet], None],
        put: Callable[[TaskEnded], None],
        refusal: Callable[[], str],
    ) -> None:
        """`ask` sends a request for chunks; `put` takes the child's end, from another thread;
        `refusal`: why the board does no job now."""
        self._folder, self._work = state_dir / FOLDER, state_dir / WORK
        self._download = Download(self._folder, window_chunks)
        self._ask, self._put, self._refusal = ask, put, refusal
        self._job: tuple[str, Job] | None = None
        self._end_task: Callable[[], None] | None = None
        self._heard: tuple[int, float] = (-1, 0.0)  # bytes of the kit, and since when no more

    @property
    def running(self) -> bool:
        """Whether there is a job."""
        return self._job is not None

    @property
    def due_s(self) -> float | None:
        """When `advance` has something to do without an event."""
        return self._download.wake_at_s if self._job is not None else None

    def begin(self, command_id: str, job: Job) -> None:
        """Fetch the kit; what is wrong is told by `advance`."""
        self._job, self._heard = (command_id, job), (-1, 0.0)
        with self._download.failing():
            shutil.rmtree(self._work, ignore_errors=True)  # an earlier agent may have been killed
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._download.begin(job.kit)

    def take(self, sha256: str, part: str, payload: bytes, now_s: float) -> None:
        """Take a part of a blob that arrived; those of other blobs are dropped."""
        if self._job is not None and self._end_task is None:
            self._download.take(sha256, part, payload, now_s)

    def advance(self, now_s: float, *, waited_for: bool) -> str:
        """Go on with the job; return why it must end, "" while it need not.

        `waited_for`: another command waits for its end.
        """
        if self._job is None:
            return ""
        problem = self._refusal() or (ANOTHER if waited_for else "")
        if problem or self._end_task is not None:
            return problem
        problem = self._download.advance(now_s)
        received = self._download.received_bytes
        if received > self._heard[0]:
            self._heard = received, now_s
        elif now_s - self._heard[1] > FETCH_S:
            problem = f"nobody sent its kit for {FETCH_S:g} s: {received} bytes are there"
        if problem:
            return problem
        if self._download.complete:
            return self._start(*self._job)
        request = self._download.next_request(now_s)
        if request is not None:
            self._ask(request)
        return ""

    def _start(self, command_id: str, job: Job) -> str:
        work = self._work / command_id

        def put(event: TaskEnded) -> None:
            shutil.rmtree(work, ignore_errors=True)  # the child is dead
            self._put(event)

        try:
            kit = self._download.finish()
            work.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (TandemError, OSError) as error:
            return download_problem(error)
        self._end_task = start_task(
            command_id, (*job.command, str(kit)), put, limit_s=job.limit_s,
            max_bytes=MAX_RESULT_BYTES, memory_bytes=default_limit_bytes(),
            environment={"TMPDIR": str(work)},
        )  # fmt: skip
        return ""

    def stop(self) -> None:
        """End the job, if there is one, and remove its kit."""
        if self._job is None:
            return
        if self._end_task is not None:
            self._end_task()
        self._job = self._end_task = None
        self._download.remove()
