"""Ensembles of a Triton repository: steps that pass tensors from model to model."""

import asyncio
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from device.errors import ConfigError
from pipelines.serving.model import Model
from pipelines.serving.model_config import Config, Port
from pipelines.serving.protocol import (
    BY_CONFIG,
    Array,
    InferRequest,
    Refusal,
    RequestedOutput,
    Status,
    Tensor,
    refuse,
)

Find = Callable[[str, str], Model]


@dataclass(frozen=True, slots=True)
class Step:
    """A model of the ensemble: its inputs and outputs, with the tensors that they are."""

    model: str
    version: str
    reads: Mapping[str, str]
    writes: Mapping[str, str]

    def can_run(self, tensors: Container[str]) -> bool:
        """Whether all that it reads is there."""
        return all(name in tensors for name in self.reads.values())


class Ensemble(Model):
    """Runs each step as soon as its tensors are there."""

    def __init__(self, version: int, config: Config, folder: Path, find: Find) -> None:
        """`find` returns a model that is ready, by name and version. Raises ConfigError."""
        batch = (None,) if config.max_batch_size else ()
        ports = [
            [
                Port(row.name, _datatype(row), (*batch, *(d if d >= 0 else None for d in row.dims)))
                for row in rows
            ]
            for rows in (config.input, config.output)
        ]
        super().__init__(version, config, ports[0], ports[1], folder)
        self._find = find
        self.steps = [
            Step(
                one.model_name,
                str(one.model_version) if one.model_version > 0 else "",
                dict(one.input_map),
                dict(one.output_map),
            )
            for one in config.ensemble_scheduling.step
        ]
        available = set(self.inputs)
        waiting = list(self.steps)
        while waiting:
            runnable = [step for step in waiting if step.can_run(available)]
            if not runnable:
                lacking = sorted(set(waiting[0].reads.values()) - available)
                raise ConfigError(
                    f"ensemble {self.name!r}: the step {waiting[0].model!r} reads {lacking[0]!r},"
                    " which is no input and which no step before it writes."
                )
            available.update(tensor for step in runnable for tensor in step.writes.values())
            waiting = [step for step in waiting if step not in runnable]
        if missing := sorted(set(self.outputs) - available):
            raise ConfigError(f"ensemble {self.name!r}: no step writes its output {missing[0]!r}.")

    def check_steps(self) -> None:
        """Raise ConfigError: a model that is ready lacks the version that a step names, or has
        other inputs and outputs than it is mapped to. One that is not ready may become so later."""
        datatypes = {name: port.datatype for name, port in self.inputs.items()}
        models = self._ready_steps()
        for step, model in models:
            where = f"ensemble {self.name!r}: the step {step.model!r}"
            needed = {name for name, port in model.inputs.items() if not port.optional}
            for which, mapped, ports in (
                ("input_map", step.reads, model.inputs), ("output_map", step.writes, model.outputs)
            ):  # fmt: skip
                if strangers := sorted(set(mapped) - set(ports)):
                    raise ConfigError(
                        f"{where} has {strangers[0]!r} in its {which}; the model has"
                        f" {', '.join(ports)}."
                    )
            if missing := sorted(needed - set(step.reads)):
                raise ConfigError(f"{where} has no {missing[0]!r} in its input_map.")
            datatypes |= {step.writes[name]: model.outputs[name].datatype for name in step.writes}
        for step, model in models:
            for name, tensor in step.reads.items():
                takes, given = model.inputs[name].datatype, datatypes.get(tensor)
                if given not in {takes, None}:
                    raise ConfigError(
                        f"ensemble {self.name!r}: {tensor!r} is {given}, and the step"
                        f" {step.model!r} takes {takes} as {name!r}."
                    )

    def _ready_steps(self) -> list[tuple[Step, Model]]:
        """Return the steps whose models are ready. Raises ConfigError: one lacks the version."""
        models = []
        for step in self.steps:
            try:
                self._find(step.model, "")
            except Refusal:
                continue
            try:
                models.append((step, self._find(step.model, step.version)))
            except Refusal as refusal:
                raise ConfigError(
                    f"ensemble {self.name!r} has version {step.version} of the step"
                    f" {step.model!r}: {refusal}."
                ) from refusal
        return models

    def close(self) -> None:
        """There is nothing to close: the models of the steps are the repository's."""

    async def run(self, request: InferRequest) -> dict[str, Array]:
        """Run the steps."""
        tensors = {tensor.name: tensor for tensor in request.inputs}
        waiting = list(self.steps)
        while waiting:
            runnable = [step for step in waiting if step.can_run(tensors)]
            if not runnable:
                lacking = sorted(set(waiting[0].reads.values()) - set(tensors))
                refuse(
                    f"ensemble {self.name!r}: {lacking[0]!r} is not given, and the step"
                    f" {waiting[0].model!r} reads it"
                )
            results = await asyncio.gather(
                *(self._run_step(step, request, tensors) for step in runnable)
            )
            for result in results:
                tensors.update(result)
            waiting = [step for step in waiting if step not in runnable]
        for name, port in self.outputs.items():
            if tensors[name].datatype != port.datatype:
                refuse(
                    f"ensemble {self.name!r}: output {name!r} is {port.datatype} in its"
                    f" configuration; the step that writes it gives {tensors[name].datatype}",
                    Status.INTERNAL,
                )
        return {name: await tensors[name].on_host() for name in self.outputs}

    async def _run_step(
        self, step: Step, request: InferRequest, tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        try:
            model = self._find(step.model, step.version)
        except Refusal as refusal:
            refuse(f"ensemble {self.name!r}: {refusal}", Status.UNAVAILABLE)
        inner = replace(
            request,
            model=step.model,
            version=step.version,
            inputs=[replace(tensors[outer], name=name) for name, outer in step.reads.items()],
            outputs=[RequestedOutput(name) for name in step.writes],
            targets={},
        )
        return {step.writes[tensor.name]: tensor for tensor in await model.infer(inner)}


def _datatype(row: Any) -> str:  # noqa: ANN401
    values = row.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    name = values[row.data_type].name
    if name not in BY_CONFIG:
        raise ConfigError(f"{row.name!r} of the ensemble has the data type {name}.")
    return BY_CONFIG[name]
