"""A model of the pipeline with the engines that may run it: its own, and those with `replaces`,
which a step of [load] puts in its place.
"""

from collections.abc import Mapping, Sequence

from msgspec import UNSET

from pipelines.frame import Frame
from pipelines.model_config import PipelineModel
from pipelines.rate import RateLimit
from pipelines.runtime.lanes import Model, Network


class ModelStage:
    """A model of the pipeline: which frames it takes, and the network that runs it now."""

    def __init__(
        self,
        config: PipelineModel,
        fallbacks: Sequence[PipelineModel],
        models: Mapping[str, Model],
        most: int,
    ) -> None:
        """`models`: by name; `most`: the most images of one inference."""
        self.config = config
        self._networks = {
            one.name: Network(one, models[one.name], most) for one in (config, *fallbacks)
        }
        self.network = self._networks[config.name]
        self._counts: dict[str, int] = {}
        self._limits: dict[str, RateLimit] = {}

    @property
    def room(self) -> int:
        """The most images that any of its networks takes at once."""
        return max(network.room for network in self._networks.values())

    def warm_up(self) -> None:
        """Warm all networks up."""
        for network in self._networks.values():
            network.warm_up()

    def close(self) -> None:
        """Free what the inputs of all networks took."""
        for network in self._networks.values():
            network.close()

    def use(self, names: Sequence[str]) -> None:
        """Let the network of these that belongs here run from now on, or the model's own."""
        fallback = next((name for name in names if name in self._networks), self.config.name)
        self.network = self._networks[fallback]

    def takes(self, frame: Frame) -> bool:
        """Count a frame; return whether the model is to see it."""
        config = self.config
        if config.cameras and frame.camera not in config.cameras:
            return False
        count = self._counts.get(frame.camera, 0)
        self._counts[frame.camera] = count + 1
        if count % config.every_nth:
            return False
        if config.max_hz is UNSET:
            return True
        limit = self._limits.setdefault(frame.camera, RateLimit(config.max_hz))
        return limit.allows(frame.t_recv.mono_ns / 1e9)

    def change(self, config: PipelineModel, fallbacks: Sequence[PipelineModel]) -> None:
        """Take other thresholds and another rate; all else is as before."""
        if config.max_hz != self.config.max_hz:
            self._limits.clear()
        self.config = config
        for one in (config, *fallbacks):
            self._networks[one.name].decode = one.reading


def model_stages_of(
    networks: Sequence[PipelineModel], models: Mapping[str, Model], most: int
) -> dict[str, ModelStage]:
    """Return a stage for each model that does not replace another one, by name, in their order.

    `most`: the most frames of one inference.
    """
    return {
        network.name: ModelStage(
            network,
            fallbacks_of(network.name, networks),
            models,
            network.max_crops if network.on else most,
        )
        for network in networks
        if not network.replaces
    }


def fallbacks_of(name: str, networks: Sequence[PipelineModel]) -> tuple[PipelineModel, ...]:
    """Return the models that replace a model."""
    return tuple(network for network in networks if network.replaces == name)
