"""Programs of other runtimes that share the board with planned models: their memory and GPU time.

A service is a stream of work for the GPU alone: `gpu_share` of each period. It takes part in the
placement as a network of one task, so that models give way to it, and its memory is counted against
the board's before anything is placed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from device.profile import Profile
from toolkit.errors import PlanError
from toolkit.partition.costs.bytes import tensor_bytes
from toolkit.partition.planning.placement import Candidate
from toolkit.partition.solver.problem import Network, Task

_MIB = 2**20


class Service(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a program takes of the board, as its user states it.

    `memory_mb`: MiB that it holds. `gpu_share`: of the GPU's time, in one piece of each
    `period_ms`; `memory_gbps`: what it reads and writes meanwhile.
    """

    name: Annotated[str, Meta(min_length=1)]
    memory_mb: Annotated[int, Meta(ge=0)]
    gpu_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    period_ms: Annotated[float, Meta(gt=0.0, le=60_000.0)] = 10.0
    memory_gbps: Annotated[float, Meta(ge=0.0, le=100_000.0)] = 0.0


def networks_of(services: Sequence[Service], profile: Profile) -> tuple[Network, ...]:
    """Return the load of services on the GPU, those that take some.

    Raises PlanError: the board has no GPU.
    """
    loads = [service for service in services if service.gpu_share]
    if loads and profile.gpu is None:
        raise PlanError(
            f"the service {loads[0].name} takes {loads[0].gpu_share:.0%} of the GPU, and"
            f" {profile.name} has none: leave out its gpu_share"
        )
    return tuple(
        Network(
            service.name,
            (
                Task(
                    service.name,
                    time_us={"gpu": service.gpu_share * service.period_ms * 1e3},
                    memory_gbps={"gpu": service.memory_gbps},
                ),
            ),
            (),
            1e3 / service.period_ms,
        )
        for service in loads
    )


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """The bytes that services and the weights of models hold, and those that the board has."""

    shares: Mapping[str, int]
    board: int

    @property
    def total(self) -> int:
        """What is taken."""
        return sum(self.shares.values())

    @property
    def sum_text(self) -> str:
        """The shares and their sum in MiB."""
        parts = " + ".join(f"{name} {_mib(size)}" for name, size in self.shares.items())
        return f"{parts} = {_mib(self.total)} MiB"

    @property
    def text(self) -> str:
        """How the memory is shared, and what is left."""
        return (
            f"memory: {self.sum_text} of {_mib(self.board)} MiB; {_mib(self.board - self.total)}"
            " MiB are left for activations, CUDA and the system"
        )


def share_memory(
    services: Sequence[Service], candidates: Sequence[Candidate], profile: Profile
) -> MemoryShares | None:
    """Return how the memory of the board is shared, None without services.

    Raises PlanError: they take more than it has.
    """
    if not services:
        return None
    shares = {service.name: service.memory_mb * _MIB for service in services}
    shares |= {f"weights of {candidate.name}": _weight_bytes(candidate) for candidate in candidates}
    memory = MemoryShares(shares, int(profile.memory.gb.value * 2**30))
    if memory.total > memory.board:
        raise PlanError(
            f"{memory.sum_text}, {profile.name} has {_mib(memory.board)} MiB: take smaller models,"
            " or a board with more memory"
        )
    return memory


def _weight_bytes(candidate: Candidate) -> int:
    """Return the bytes of a model's constants at the precision of the plan."""
    constants = {
        tensor.name: tensor_bytes(tensor, candidate.costs.precision) or 0
        for view in candidate.views
        for tensor in view.inputs
        if tensor is not None and tensor.constant
    }
    return sum(constants.values())


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f}"
