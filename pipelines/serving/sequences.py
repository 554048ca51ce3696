"""Sequences: requests of one correlation id run one after the other, and their state is kept."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from device.errors import ConfigError
from pipelines.serving.instances import Opened
from pipelines.serving.model import QueuedModel
from pipelines.serving.model_config import Config, Port, inside
from pipelines.serving.protocol import (
    BY_CONFIG,
    BYTES,
    DATATYPES,
    Array,
    InferRequest,
    Parameter,
    Status,
    refuse,
)

MAX_SEQUENCES = 4096  # of a model at once
IDLE_US = 1_000_000  # Triton's
INITIAL_STATES = "initial_state"  # folder of the files that sequences begin with
START, READY, END, CORRELATION = range(4)  # kinds of control inputs
FLAGS = (("int32_false_true", "INT32"), ("fp32_false_true", "FP32"), ("bool_false_true", "BOOL"))


@dataclass(frozen=True, slots=True)
class Control:
    """An input that the server gives: `values` for no and yes, none for the correlation id."""

    name: str
    kind: int
    datatype: str
    values: Sequence[Any] = ()

    def of(self, ident: Parameter, flags: Mapping[int, bool]) -> Any:  # noqa: ANN401
        """Return its value for a request. Raises Refusal: it takes no such correlation id."""
        if self.kind != CORRELATION:
            return self.values[flags[self.kind]]
        if self.datatype == BYTES:
            return str(ident)
        limits = np.iinfo(DATATYPES[self.datatype].numpy)
        if not isinstance(ident, int) or not limits.min <= ident <= limits.max:
            refuse(f"the sequence_id is {ident!r:.100}; the model takes {self.datatype}")
        return ident


@dataclass(slots=True)
class _Running:
    """A sequence: `states` by input, `waiting` requests."""

    states: Mapping[str, Array]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    heard_s: float = 0.0


class SequenceModel(QueuedModel):
    """A model whose requests belong to sequences; those of several share batches."""

    def __init__(
        self, version: int, config: Config, opened: Opened, folder: Path, max_queue: int
    ) -> None:
        """As QueuedModel. Raises ConfigError: controls or states do not fit."""
        rows = config.sequence_batching
        if rows.iterative_sequence:
            raise ConfigError(f"model {config.name!r} has an iterative_sequence: it is not served.")
        self._batch_dims = (1,) if config.max_batch_size else ()
        inputs, outputs = ({port.name: port for port in ports} for ports in (
            opened.inputs, opened.outputs
        ))  # fmt: skip
        self._controls = [
            _control(config, row.name, one, inputs) for row in rows.control_input
            for one in row.control
        ]  # fmt: skip
        self._initial = {}
        self._kept = {row.input_name: row.output_name for row in rows.state}
        for row in rows.state:
            datatype = _datatype(row)
            for name, ports in ((row.input_name, inputs), (row.output_name, outputs)):
                _check(config, "state", name, datatype, ports)
            self._initial[row.input_name] = self._first_state(config.name, row, folder)
        self._running: dict[Parameter, _Running] = {}
        self._idle_s = (rows.max_sequence_idle_microseconds or IDLE_US) / 1e6
        super().__init__(version, config, opened, folder, max_queue)

    def _first_state(self, model: str, row: Any, folder: Path) -> Array:  # noqa: ANN401
        initial = row.initial_state[0] if row.initial_state else None
        shape = (*self._batch_dims, *(initial.dims if initial else row.dims))
        kind = DATATYPES[_datatype(row)].numpy
        if kind.hasobject or min(shape, default=0) < 0:
            raise ConfigError(
                f"state {row.input_name!r} of model {model!r} has no size that is known: give it an"
                " initial_state with dims, and a data_type of numbers."
            )
        if initial is None or not initial.data_file:
            return np.zeros(shape, kind)
        path = inside(folder / INITIAL_STATES, initial.data_file)
        try:
            return np.frombuffer(path.read_bytes(), kind).reshape(shape)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"state {row.input_name!r} of model {model!r}: {path} has not the bytes of"
                f" {list(shape)} ({error})."
            ) from error

    def sample(self) -> InferRequest:
        """Return a sequence of zeros: one request."""
        flags: dict[str, Parameter] = {
            "sequence_id": "tandem",
            "sequence_start": True,
            "sequence_end": True,
        }
        if any(one.kind == CORRELATION and one.datatype != BYTES for one in self._controls):
            flags["sequence_id"] = 1
        return replace(super().sample(), parameters=flags)

    async def run(
        self, request: InferRequest, hidden: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Wait for the request before it, then run with the state that it left."""
        where, parameters = f"model {self.name!r}", request.parameters
        ident = parameters.get("sequence_id", 0)
        if not ident or isinstance(ident, bool | float):
            refuse(
                f"inference request to {where} must specify a non-zero or non-empty correlation ID:"
                " give a sequence_id"
            )
        if self.rows(request) != 1:
            refuse(f"inference request to {where} must specify batch-size 1: it is of a sequence")
        flags = {
            START: parameters.get("sequence_start") is True, READY: True,
            END: parameters.get("sequence_end") is True,
        }  # fmt: skip
        controls = {
            one.name: np.full(
                (*self._batch_dims, 1), one.of(ident, flags), DATATYPES[one.datatype].numpy
            )
            for one in self._controls
        }
        running = self._sequence(ident, starts=flags[START], ends=flags[END])
        running.waiting += 1
        try:
            async with running.lock:
                outputs = await super().run(request, {**controls, **running.states})
                running.states = {name: outputs[kept] for name, kept in self._kept.items()}
        finally:
            running.waiting -= 1
            running.heard_s = time.monotonic()
        return outputs

    def _sequence(self, ident: Parameter, *, starts: bool, ends: bool) -> _Running:
        """Return a sequence, a new one where it starts; one that ends is forgotten. Raises
        Refusal."""
        now_s = time.monotonic()
        while self._running:
            oldest = next(iter(self._running))
            one = self._running[oldest]
            if one.waiting or now_s - one.heard_s <= self._idle_s:
                break
            del self._running[oldest]
        running = self._running.pop(ident, None)
        if starts:
            running = _Running(self._initial)
        if running is None:
            refuse(
                f"inference request for sequence {ident!r:.100} to model {self.name!r} must"
                " specify the START flag on the first request of the sequence"
            )
        if len(self._running) >= MAX_SEQUENCES:
            refuse(
                f"model {self.name!r} has {MAX_SEQUENCES} sequences that have not ended, the"
                " most: try again later",
                Status.BUSY,
            )
        if not ends:
            self._running[ident] = running  # behind those that were heard before
        return running


def _datatype(row: Any) -> str:  # noqa: ANN401
    values = row.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    return BY_CONFIG.get(values[row.data_type].name, "")


def _control(config: Config, name: str, row: Any, inputs: Mapping[str, Port]) -> Control:  # noqa: ANN401
    if row.kind == CORRELATION:
        datatype = _datatype(row)
        countable = datatype in DATATYPES and DATATYPES[datatype].numpy.kind in "iuO"
        control = Control(name, CORRELATION, datatype if countable else "")
    else:
        values, datatype = next(
            ((getattr(row, key), kind) for key, kind in FLAGS if len(getattr(row, key)) == 2),
            ((), ""),
        )
        control = Control(name, row.kind, datatype, tuple(values))
    _check(config, "control", name, control.datatype, inputs)
    return control


def _check(
    config: Config, what: str, name: str, datatype: str, ports: Mapping[str, Port]
) -> None:  # fmt: skip
    inside_type = ports[name].datatype if name in ports else "not there"
    if datatype != inside_type:
        raise ConfigError(
            f"the sequence {what} {name!r} of model {config.name!r} is {datatype or 'of no type'}"
            f" in its configuration, {inside_type} inside."
        )
