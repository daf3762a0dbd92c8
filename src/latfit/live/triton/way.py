"""What both ways to a Triton server have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from latfit.live.engines import Array

ASKED_S = 2.0
"""How long a server may take to say what a model is, and whether it is ready."""


class Call(Protocol):
    """A batch on its way, which can be given up."""

    def cancel(self) -> object: ...


Calls = list[Call]


@dataclass(frozen=True)
class Described:
    """A model. inputs: data type by name, as Triton calls it.  largest: its max_batch_size."""

    inputs: Mapping[str, str]
    largest: int


class Refused(Exception):
    """What came instead of an answer. kind: whether the server is lost, the batch late, or the answer an error."""

    def __init__(self, kind: Literal["lost", "late", "error"], text: str = "") -> None:
        super().__init__(text)
        self.kind = kind


def lost(text: str) -> Refused:
    return Refused("lost", text)


def late() -> Refused:
    return Refused("late")


def refused(text: str) -> Refused:
    return Refused("error", text)


class Way(Protocol):
    """To one model of a server, from any thread. All but `ready` raise Refused."""

    def described(self) -> Described: ...

    def ready(self) -> bool: ...

    def infer(self, tensors: Sequence[tuple[str, str, Array]], calls: Calls) -> dict[str, Array]:
        """Outputs for inputs (name, data type, array). calls: where the call is put, to be cancelled."""
        ...

    def close(self) -> None: ...
