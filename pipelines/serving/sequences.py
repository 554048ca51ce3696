"""Sequences: requests of one correlation id run one after the other, and their state is kept."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from msgspec.structs import replace

from device.errors import ConfigError
from pipelines.serving.instances import ModelInstances
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
from pipelines.serving.queued_model import QueuedModel

MAX_SEQUENCES = 4096  # of a model at once
MAX_STATE_BYTES = 1 << 28  # of all sequences of a server
EXPIRE_S = (1.0, 60.0)  # how soon idle sequences are looked for: at the least and at the most
IDLE_US = 1_000_000  # Triton's
INITIAL_STATES = "initial_state"  # folder of the files that sequences begin with
FLAGS = (("int32_false_true", "INT32"), ("fp32_false_true", "FP32"), ("bool_false_true", "BOOL"))


class ControlKind(IntEnum):
    """What a control input tells, numbered as in model_config.proto."""

    START = 0
    READY = 1
    END = 2
    CORRELATION = 3


@dataclass(frozen=True, slots=True)
class Control:
    """An input that the server gives: `values` for no and yes, none for the correlation id."""

    name: str
    kind: ControlKind
    datatype: str
    values: Sequence[Any] = ()

    def value_for(self, ident: Parameter, flags: Mapping[ControlKind, bool]) -> Any:  # noqa: ANN401
        """Return its value for a request. Raises Refusal: it takes no such correlation id."""
        if self.kind != ControlKind.CORRELATION:
            return self.values[flags[self.kind]]
        if self.datatype == BYTES:
            return str(ident)
        limits = np.iinfo(DATATYPES[self.datatype].numpy)
        if not isinstance(ident, int) or not limits.min <= ident <= limits.max:
            refuse(f"the sequence_id is {ident!r:.100}; the model takes {self.datatype}")
        return ident


@dataclass(slots=True)
class SequenceState:
    """A sequence: `states` by input, `waiting` requests; `ended` when its last one succeeded."""

    states: Mapping[str, Array]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    last_used_s: float = field(default_factory=time.monotonic)
    ended: bool = False


class StateBudget:
    """The bytes of states of all sequences of a server. Models end in other threads: `lock`."""

    def __init__(self) -> None:
        self.bytes = 0
        self.lock = threading.RLock()
        self._expire: dict[object, Callable[[], None]] = {}

    def add(self, model: object, expire: Callable[[], None]) -> None:
        """Let a model have sequences; `expire` forgets those that have been idle for too long."""
        with self.lock:
            self._expire[model] = expire

    def remove(self, model: object) -> None:
        """Forget a model."""
        with self.lock:
            self._expire.pop(model, None)

    def count(self, more: int) -> None:
        """Count bytes. Raises Refusal: there would be too many."""
        with self.lock:
            if more > 0 and self.bytes + more > MAX_STATE_BYTES:
                for expire in self._expire.values():
                    expire()
            if more > 0 and self.bytes + more > MAX_STATE_BYTES:
                refuse(
                    "the states of all sequences of this server would have"
                    f" {self.bytes + more} bytes, and may have {MAX_STATE_BYTES}: end sequences,"
                    " or try again later",
                    Status.BUSY,
                )
            self.bytes += more


class SequenceModel(QueuedModel):
    """A model whose requests belong to sequences; those of several share batches."""

    def __init__(
        self, version: int, config: Config, opened: ModelInstances, folder: Path, max_queue: int, *,
        budget: StateBudget,
    ) -> None:  # fmt: skip
        """As QueuedModel; `budget`: of all models. Raises ConfigError: controls or states do not
        fit."""
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
        self._sequences: dict[Parameter, SequenceState] = {}
        self._budget = budget
        self._timer: asyncio.TimerHandle | None = None
        self._idle_s = (rows.max_sequence_idle_microseconds or IDLE_US) / 1e6
        super().__init__(version, config, opened, folder, max_queue)
        budget.add(self, self._expire)

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
        if any(
            control.kind == ControlKind.CORRELATION and control.datatype != BYTES
            for control in self._controls
        ):
            flags["sequence_id"] = 1
        return replace(super().sample(), parameters=flags)

    async def run(self, request: InferRequest) -> dict[str, Array]:
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
        flags: dict[ControlKind, bool] = {
            ControlKind.START: parameters.get("sequence_start") is True, ControlKind.READY: True,
            ControlKind.END: parameters.get("sequence_end") is True,
        }  # fmt: skip
        controls = {
            control.name: np.full(
                (*self._batch_dims, 1),
                control.value_for(ident, flags),
                DATATYPES[control.datatype].numpy,
            )
            for control in self._controls
        }
        sequence = self._sequence(ident, starts=flags[ControlKind.START])
        sequence.waiting += 1
        try:
            async with sequence.lock:
                if sequence.ended:
                    self._refuse_unknown(ident)
                outputs = await self.run_on_host(request, {**controls, **sequence.states})
                if flags[ControlKind.END]:
                    sequence.ended = True
                    if self._sequences.get(ident) is sequence:
                        self._forget(ident)
                else:  # copies: an output is a row of a batch
                    states = {name: outputs[output].copy() for name, output in self._kept.items()}
                    if self._sequences.get(ident) is sequence:
                        self._budget.count(_bytes(states) - _bytes(sequence.states))
                    sequence.states = states
        finally:
            sequence.waiting -= 1
            sequence.last_used_s = time.monotonic()
        return outputs

    def close(self) -> None:
        """As QueuedModel; sequences are forgotten."""
        super().close()
        self._budget.remove(self)
        for ident in list(self._sequences):
            self._forget(ident)

    def _sequence(self, ident: Parameter, *, starts: bool) -> SequenceState:
        """Return a sequence, a new one where it starts. Raises Refusal."""
        sequence = self._sequences.get(ident)
        if sequence is not None and (starts or self._is_idle(sequence)):
            self._forget(ident)
            sequence = None
        if starts:
            if len(self._sequences) >= MAX_SEQUENCES:
                self._expire()
            if len(self._sequences) >= MAX_SEQUENCES:
                refuse(
                    f"model {self.name!r} has {MAX_SEQUENCES} sequences that have not ended, the"
                    " most: try again later",
                    Status.BUSY,
                )
            self._budget.count(_bytes(self._initial))
            self._sequences[ident] = sequence = SequenceState(self._initial)
            if self._timer is None:
                self._set_timer()
        if sequence is None:
            self._refuse_unknown(ident)
        return sequence

    def _refuse_unknown(self, ident: Parameter) -> NoReturn:
        refuse(
            f"inference request for sequence {ident!r:.100} to model {self.name!r} must"
            " specify the START flag on the first request of the sequence"
        )

    def _forget(self, ident: Parameter) -> None:
        with self._budget.lock:
            sequence = self._sequences.pop(ident, None)
            if sequence is not None:
                self._budget.count(-_bytes(sequence.states))

    def _is_idle(self, sequence: SequenceState) -> bool:
        return not sequence.waiting and time.monotonic() - sequence.last_used_s > self._idle_s

    def _expire(self) -> None:
        """Forget the sequences that have been idle for too long."""
        for ident in [key for key, one in list(self._sequences.items()) if self._is_idle(one)]:
            self._forget(ident)

    def _tick(self) -> None:
        self._timer = None
        self._expire()
        if self._sequences:
            self._set_timer()

    def _set_timer(self) -> None:
        """Look for idle sequences when the first may be, and while there are any."""
        first_s = min(sequence.last_used_s for sequence in self._sequences.values()) + self._idle_s
        delay_s = min(max(EXPIRE_S[0], first_s - time.monotonic()), EXPIRE_S[1])
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)


def _bytes(states: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in states.values())


def _datatype(row: Any) -> str:  # noqa: ANN401
    values = row.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    return BY_CONFIG.get(values[row.data_type].name, "")


def _control(config: Config, name: str, row: Any, inputs: Mapping[str, Port]) -> Control:  # noqa: ANN401
    if row.kind not in set(ControlKind):
        raise ConfigError(f"control {name!r} of model {config.name!r} has no kind {row.kind}.")
    if row.kind == ControlKind.CORRELATION:
        datatype = _datatype(row)
        countable = datatype in DATATYPES and DATATYPES[datatype].numpy.kind in "iuO"
        control = Control(name, ControlKind.CORRELATION, datatype if countable else "")
    else:
        values, datatype = next(
            ((getattr(row, key), kind) for key, kind in FLAGS if len(getattr(row, key)) == 2),
            ((), ""),
        )
        control = Control(name, ControlKind(row.kind), datatype, tuple(values))
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
