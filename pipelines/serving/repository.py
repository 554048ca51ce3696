"""The models on disk, and which of them are ready.

A folder has engines (`NAME.engine`), models (`NAME.onnx`), each with `NAME.pbtxt` or without,
bundles, and folders as Triton's: `NAME/config.pbtxt`, `NAME/1/model.engine`.
"""

import asyncio
import logging
import tempfile
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from device.errors import ConfigError, SessionError, TandemError
from device.runtime.executors.protocol import ExecutorName
from pipelines.serving.bundles import BundleModel, PictureModel, is_bundle, models_of
from pipelines.serving.config_checks import fields_without_effect
from pipelines.serving.ensemble import Ensemble
from pipelines.serving.instances import open_file
from pipelines.serving.model import Model
from pipelines.serving.model_config import (
    CONFIG,
    ENSEMBLE,
    Config,
    complete,
    inside,
    parse_config,
    parse_override,
    read_config,
)
from pipelines.serving.protocol import Refusal, Status, refuse
from pipelines.serving.queued_model import QueuedModel
from pipelines.serving.sequences import SequenceModel, StateBudget
from pipelines.serving.warm_up import warm_up

Mode = Literal["none", "explicit", "poll"]

SUFFIXES = (".engine", ".onnx")  # the first that is there is run
READY, UNAVAILABLE, LOADING, UNLOADING = "READY", "UNAVAILABLE", "LOADING", "UNLOADING"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """A model on disk: `versions` are its files, or folders without one that is run; `defaults`:
    the text of its configuration where it has no file."""

    name: str
    folder: Path
    config: Path | None
    versions: Mapping[int, Path]
    defaults: str = ""
    picture: BundleModel | None = None

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        """What changes when a file does."""
        files = [path for path in (self.config, *self.versions.values()) if path is not None]
        rows = []
        for path in files:
            try:
                status = path.stat()
            except OSError:
                continue
            rows.append((str(path), status.st_mtime_ns, status.st_size))
        return tuple(rows)


def scan(root: Path) -> dict[str, Source]:
    """Return the models in a folder, by name. Raises ConfigError: it cannot be read."""
    try:
        entries = sorted(root.iterdir())
    except OSError as error:
        raise ConfigError(f"the repository {root} cannot be read ({error.strerror}).") from error
    sources: dict[str, Source] = {}
    for path in reversed(entries):  # so that an engine replaces the .onnx of the same name
        if path.name.startswith("."):
            continue
        try:
            sources |= {source.name: source for source in _sources(path)}
        except (OSError, TandemError) as error:
            _log.error("%s is left out: %s", path, error)
    return dict(sorted(sources.items()))


def _sources(path: Path) -> list[Source]:
    """Return the models of an entry of a repository. Raises OSError, TandemError."""
    if is_bundle(path):
        return [
            Source(
                one.name, one.engine.parent, None, {1: one.engine}, one.config,
                one if one.picture is not None else None,
            )
            for one in models_of(path)
        ]  # fmt: skip
    if path.is_file() and path.suffix in SUFFIXES:
        config = path.with_suffix(".pbtxt")
        return [Source(path.stem, path.parent, config if config.is_file() else None, {1: path})]
    source = _folder(path) if path.is_dir() else None
    return [source] if source is not None else []


def _folder(path: Path) -> Source | None:
    config = path / CONFIG
    numbers = [
        one for one in path.iterdir() if one.is_dir() and one.name.isdecimal() and int(one.name) > 0
    ]
    versions = {
        int(number.name): next(
            (number / f"model{end}" for end in SUFFIXES if (number / f"model{end}").is_file()),
            number,
        )
        for number in sorted(numbers, key=lambda path: int(path.name))
    }
    if not config.is_file() and all(version.is_dir() for version in versions.values()):
        return None
    return Source(path.name, path, config if config.is_file() else None, versions)


class Repository:
    """The models of a folder; all methods are for the thread of the event loop."""

    def __init__(
        self,
        scan: Callable[[], Mapping[str, Source]],
        mode: Mode,
        *,
        profile: str | None = None,
        executor: ExecutorName = "auto",
        max_queue: int = 1024,
    ) -> None:
        """`scan` returns the models on disk, by name."""
        self._scan = scan
        self.mode = mode
        self._profile, self._executor = profile, executor
        self._max_queue = max_queue
        self._state_budget = StateBudget()
        self._models: dict[str, dict[int, Model]] = {}
        self._states: dict[str, dict[int, tuple[str, str]]] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._loaded_from: dict[str, tuple[tuple[str, int, int], ...]] = {}
        self._loading: dict[str, Config] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def models(self) -> Sequence[Model]:
        """Every version that is ready."""
        return [model for versions in self._models.values() for model in versions.values()]

    @property
    def reasons(self) -> dict[str, str]:
        """Why models are not ready."""
        return {
            name: reason
            for name, versions in self._states.items()
            for state, reason in versions.values()
            if state == UNAVAILABLE and reason != "unloaded"
        }

    def find(self, name: str, version: str = "") -> Model:
        """Return a model that is ready, the newest version if none is named. Raises Refusal."""
        versions = self._models.get(name)
        if not versions:
            known = self._states.get(name)
            if known:
                state, reason = known[max(known)]
                refuse(
                    f"Request for unknown model: {name!r} is not ready: {state} {reason}".rstrip(),
                    Status.NOT_FOUND if reason == "unloaded" else Status.UNAVAILABLE,
                )
            refuse(f"Request for unknown model: {name!r} is not found", Status.NOT_FOUND)
        if not version:
            return versions[max(versions)]
        if not version.isdecimal() or len(version) > 18 or int(version) not in versions:
            refuse(
                f"Request for unknown model: {name!r} has no version {version[:40]!r} that is"
                f" ready; it has {', '.join(map(str, sorted(versions)))}",
                Status.NOT_FOUND,
            )
        return versions[int(version)]

    def versions(self, name: str) -> list[int]:
        """Return the versions of a model that are ready."""
        return sorted(self._models.get(name, ()))

    async def index(self) -> list[dict[str, str]]:
        """Return all models of the folder with their state."""
        try:
            unknown = [name for name in await self._sources() if name not in self._states]
        except ConfigError:
            unknown = []
        rows = [
            {"name": name, "version": str(number), "state": state, "reason": reason}
            for name, versions in self._states.items()
            for number, (state, reason) in sorted(versions.items())
        ]
        rows += [{"name": name, "version": "", "state": "", "reason": ""} for name in unknown]
        return sorted(rows, key=lambda row: row["name"])

    async def _sources(self) -> Mapping[str, Source]:
        """Return the models on disk. Raises ConfigError."""
        return await asyncio.to_thread(self._scan)

    async def load_all(self, names: Sequence[str] = ()) -> None:
        """Load all models, in mode explicit those of `names` ("*": all); what fails is noted."""
        sources = await self._sources()
        if self.mode == "explicit" and "*" not in names:
            for name in names:
                if name not in sources:
                    raise ConfigError(
                        f"the repository has no model {name!r}: it has"
                        f" {', '.join(sources) or 'none'}."
                    )
            sources = {name: sources[name] for name in names}
        for source in sources.values():
            try:
                await self._load(source)
            except (OSError, TandemError) as error:
                _log.error("model %r is not ready: %s", source.name, error)

    async def poll(self, every_s: float) -> None:
        """Load what is new or changes, unload what has gone, until cancelled."""
        before: dict[str, tuple[tuple[str, int, int], ...]] = {}
        while True:
            await asyncio.sleep(every_s)
            try:
                before = await self._look_again(before)
            except ConfigError as error:
                _log.error("%s", error)
            except Exception:  # noqa: BLE001  (polling goes on)
                _log.exception("the repository is looked at again in %s s", every_s)

    async def _look_again(
        self, before: Mapping[str, tuple[tuple[str, int, int], ...]]
    ) -> dict[str, tuple[tuple[str, int, int], ...]]:
        sources = await self._sources()
        now = await asyncio.to_thread(
            lambda: {name: source.signature() for name, source in sources.items()}
        )
        for name, signature in now.items():
            is_stable = before.get(name) == signature  # else it may still be written
            if is_stable and self._loaded_from.get(name) != signature:
                try:
                    await self._load(sources[name])
                except (OSError, TandemError) as error:
                    _log.error("model %r is not loaded: %s", name, error)
        for name in [model for model in self._models if model not in now]:
            await self._unload(name)
        return now

    async def load(
        self, name: str, override: str = "", files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load a model, or its files anew; the former one answers until this one is ready.

        `override` is a configuration in JSON; `files`, by `VERSION/NAME` or `NAME`, replace the
        model's.
        Raises Refusal.
        """
        self._check_control()
        _check_name(name)
        try:
            if files:
                await self._finish(self._load_files(name, override, files))
                return
            source = (await self._sources()).get(name)
            if source is None:
                refuse(
                    f"failed to load {name!r}, failed to poll from model repository: it has"
                    " no such model",
                    Status.NOT_FOUND,
                )
            await self._load(source, parse_override(override) if override else None)
        except Refusal:
            raise
        except TandemError as error:
            refuse(f"failed to load {name!r}: {error}")

    async def unload(self, name: str, *, with_steps: bool = False) -> None:
        """Answer what waits for a model, then close it. Raises Refusal."""
        self._check_control()
        if name not in self._states:
            refuse(f"failed to unload {name!r}: no such model was loaded", Status.NOT_FOUND)
        steps = [
            step.model
            for model in self._models.get(name, {}).values()
            if isinstance(model, Ensemble)
            for step in model.steps
        ]
        await self._unload(name)
        for step in steps if with_steps else ():
            if step in self._models:
                await self._unload(step)

    async def close(self) -> None:
        """Close all models, also those that are being loaded."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name in list(self._models):
            await self._unload(name)

    async def _finish(self, change: Coroutine[Any, Any, None]) -> None:
        """Wait for a change, which goes on to its end where the caller is cancelled."""
        task = asyncio.create_task(change)
        self._tasks.add(task)  # the loop itself holds no reference
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    def _check_control(self) -> None:
        if self.mode != "explicit":
            refuse(
                "explicit model load / unload is not allowed if polling is enabled, or if all"
                f" models are loaded at the start: the mode is {self.mode!r}, not 'explicit'",
                Status.UNAVAILABLE,
            )

    async def _load_files(self, name: str, override: str, files: Mapping[str, bytes]) -> None:
        if not override:
            refuse(f"failed to load {name!r}: files in the request need `config` beside them")
        with tempfile.TemporaryDirectory() as folder:
            for place, content in files.items():
                version, _, file_name = place.rpartition("/")
                if (
                    (version and not version.isdecimal())
                    or file_name in {"", ".", ".."}
                    or "\0" in place
                    or place.startswith("/")
                ):
                    refuse(
                        f"failed to load {name!r}: the file {place[:300]!r} is not VERSION/NAME or"
                        " NAME"
                    )
                path = Path(folder, name, version, file_name)
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
                except OSError as error:
                    refuse(
                        f"failed to load {name!r}, failed to poll from model repository: the file"
                        f" {place[:100]!r} is not written ({error.strerror})",
                        Status.INTERNAL,
                    )
            source = _folder(Path(folder, name))
            if source is None:
                refuse(f"failed to load {name!r}: the request has no file of a version")
            await self._load(source, parse_override(override))

    async def _load(self, source: Source, override: Config | None = None) -> None:
        await self._finish(self._load_locked(source, override))

    async def _load_locked(self, source: Source, override: Config | None) -> None:
        name = source.name
        async with self._locks[name]:
            states = self._states.setdefault(name, {})
            former = self._models.get(name, {})
            self._loaded_from[name] = source.signature()
            try:
                config = override
                if config is None:
                    config = (
                        parse_config(source.defaults, name) if source.config is None
                        else read_config(source.config)
                    )  # fmt: skip
                self._loading[name] = config
                if config.HasField("ensemble_scheduling"):
                    await self._load_steps(name, config)
                versions = _versions(config, source)
                if not former:
                    states |= dict.fromkeys(versions, (LOADING, ""))
                models = await asyncio.to_thread(self._open_all, source, config, versions)
            except Exception as error:
                if not former:
                    numbers = list(states) or [max(source.versions, default=1)]
                    states |= {number: (UNAVAILABLE, str(error)) for number in numbers}
                raise
            finally:
                self._loading.pop(name, None)
            self._models[name] = models
            self._states[name] = {
                **dict.fromkeys(former, (UNAVAILABLE, "unloaded")),
                **dict.fromkeys(models, (READY, "")),
            }
            _log.info("model %r is ready: version %s", name, ", ".join(map(str, models)))
            if unused := sorted(fields_without_effect(config)):
                _log.warning("model %r: without effect here: %s", name, ", ".join(unused))
            for model in former.values():
                await asyncio.to_thread(model.close)

    async def _load_steps(self, name: str, config: Config) -> None:
        sources = await self._sources()
        for step in config.ensemble_scheduling.step:
            if self._reaches(step.model_name, name, sources):
                raise ConfigError(f"ensemble {name!r} has itself as a step.")
            if step.model_name in self._models:
                continue
            if step.model_name in sources:
                await self._load(sources[step.model_name])
            elif self.mode != "poll":  # else it may come
                raise ConfigError(
                    f"ensemble {name!r} has the step {step.model_name!r}, which the repository has"
                    " not."
                )

    def _reaches(self, start: str, name: str, sources: Mapping[str, Source]) -> bool:
        """Whether a model is, or has as a step, the one of this name: by the files on disk, and by
        configurations of requests."""
        seen, waiting = set(), [start]
        while waiting:
            one = waiting.pop()
            if one == name:
                return True
            if one in seen:
                continue
            seen.add(one)
            configs = [model.config for model in self._models.get(one, {}).values()]
            if one in self._loading:
                configs.append(self._loading[one])
            source = sources.get(one)
            if source is not None and source.config is not None:
                configs.append(read_config(source.config))
            for config in configs:
                waiting += [step.model_name for step in config.ensemble_scheduling.step]
        return False

    def _open_all(
        self, source: Source, config: Config, versions: Sequence[int]
    ) -> dict[int, Model]:
        """Open all versions or none, in a thread. Raises TandemError."""
        with ExitStack() as opened:
            models = {
                number: opened.enter_context(self._open(source, config, number))
                for number in versions
            }
            opened.pop_all()
        return models

    def _open(self, source: Source, config: Config, version: int) -> Model:
        """Open a version. Raises TandemError."""
        if source.picture is not None:
            return PictureModel(version, source.picture, self.find)
        if config.HasField("ensemble_scheduling"):
            full = complete(config, source.name, ENSEMBLE, (), ())
            ensemble = Ensemble(version, full, source.folder, self.find)
            ensemble.check_steps()
            return ensemble
        path = source.versions[version]
        if config.default_model_filename and path.parent.is_dir():
            folder = path if path.is_dir() else path.parent
            named = inside(folder, config.default_model_filename)
            path = named if named.is_file() and named.suffix in SUFFIXES else path
        if path.is_dir():
            files = ", ".join(sorted(one.name for one in path.iterdir())) or "nothing"
            raise SessionError(
                f"model {source.name!r}: {path} has no model.engine and no model.onnx, but {files};"
                f" `tandem import-triton` builds engines."
            )
        core, count = None, 0
        for group in config.instance_group:
            count += max(1, group.count)
            core = next((device.device_id for device in group.secondary_devices), core)
        opened = open_file(path, count, core, self._profile, self._executor)
        platform = "onnxruntime_onnx" if path.suffix == ".onnx" else "tandem_engine"
        try:
            full = complete(config, source.name, platform, opened.inputs, opened.outputs)
            if full.HasField("sequence_batching"):
                return SequenceModel(
                    version, full, opened, source.folder, self._max_queue, budget=self._state_budget
                )
            model = QueuedModel(version, full, opened, source.folder, self._max_queue)
        except TandemError:
            for runner in opened.runners:
                runner.close()
            raise
        try:
            warm_up(model, source.folder)
        except BaseException:
            model.close()
            raise
        return model

    async def _unload(self, name: str) -> None:
        await self._finish(self._unload_locked(name))

    async def _unload_locked(self, name: str) -> None:
        async with self._locks[name]:
            models = self._models.pop(name, {})
            self._loaded_from.pop(name, None)
            states = self._states[name]
            states |= dict.fromkeys(models, (UNLOADING, ""))
            for model in models.values():
                await asyncio.to_thread(model.close)
            self._states[name] = dict.fromkeys(states, (UNAVAILABLE, "unloaded"))
            _log.info("model %r is unloaded", name)


def _check_name(name: str) -> None:
    """Raise Refusal: no folder of a model is called so."""
    if not name.strip():
        refuse(
            f"failed to load {name!r}: Model name cannot be empty. Please enter a valid name to"
            " deploy."
        )
    if name.strip() in {".", ".."} or set("/\\\0") & set(name):
        refuse(
            f"failed to load {name!r}: model name must not contain path traversal characters: it is"
            " the name of a folder"
        )


def _versions(config: Config, source: Source) -> list[int]:
    """Return the versions that a configuration wants. Raises ConfigError: there is none."""
    numbers = sorted(source.versions) or ([1] if config.HasField("ensemble_scheduling") else [])
    policy = config.version_policy
    kind = policy.WhichOneof("choice")
    if kind == "specific":
        versions = [number for number in numbers if number in policy.specific.versions]
    elif kind == "all":
        versions = numbers
    else:
        versions = numbers[-max(1, policy.latest.num_versions if kind else 1) :]
    if not versions:
        raise ConfigError(
            f"model {source.name!r} has no version that its version_policy wants; {source.folder}"
            f" has {', '.join(map(str, numbers)) or 'none'}."
        )
    return versions
