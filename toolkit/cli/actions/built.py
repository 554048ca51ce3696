"""What a build leaves behind beside its engine, also in the cache."""

import msgspec


class Built(msgspec.Struct, frozen=True):
    """What a build says, as text and as JSON, and the table that it has measured."""

    text: str
    json: str
    table: bytes | None
