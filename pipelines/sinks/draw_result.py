"""Draw a frame's result on its image: what its models say, zones, lines and the time it took."""

from collections.abc import Collection

from pipelines.frame import Image
from pipelines.results import ClassScores, Texts
from pipelines.sinks.draw import Drawing, annotate_all
from pipelines.sinks.result import FrameResult

COLOR_STEP = 3  # between the first classes of two models; no divisor of the number of colours


def draw_result(result: FrameResult, names: Collection[str] = ()) -> Image:
    """Return a copy of the frame's image, uint8 [H, W, 3] BGR, with the results of these models, or
    of all that are to be drawn."""
    hidden = result.roles.hidden
    seen = {
        name: one
        for name, one in result.by_model.items()
        if (name in names if names else name not in hidden)
    }
    order = list(result.by_model)
    listed = [name for name, one in seen.items() if isinstance(one.decoded, ClassScores | Texts)]
    drawings = [
        Drawing(
            one.decoded,
            one.labels,
            title=name if len(listed) > 1 and name in listed else "",
            first_color=COLOR_STEP * order.index(name),
            hidden=hidden,
        )
        for name, one in seen.items()
    ]
    return annotate_all(
        result.frame.image,
        drawings,
        result.event.latency_ms["total"],
        result.places,
        result.zones,
    )
