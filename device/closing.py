"""What a `with` block closes at its end."""

from abc import ABC, abstractmethod
from typing import TypeVar

_Closing = TypeVar("_Closing", bound="Closing")


class Closing(ABC):
    """Enter it to have it closed at the end of the block."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; a second call does nothing."""

    def __enter__(self: _Closing) -> _Closing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
