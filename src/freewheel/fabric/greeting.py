"""Who may talk to whom: what two workers say of themselves first, and what they must agree on."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.fabric import frames
from freewheel.fabric.base import Tag
from freewheel.fabric.frames import BadFrame, Frame, Kind


@dataclass(frozen=True)
class Identity:
    """What two workers must agree on before they talk."""

    run: bytes
    rank: int
    world_size: int
    incarnation: int
    version: str
    model: str
    """A digest of the model's parameters: names, shapes, types."""
    longest: int
    """The length of the longest vector of the run."""
    wire: str = "fp32"
    """What a strategy's vectors travel as."""
    place: str = ""
    """Where this process runs, for finding those that can share memory; empty: nobody can."""

    def hello(self, near: bool = True) -> bytes:
        """The first frame of this worker on a connection."""
        tag = ("hello", self.version, self.model, self.place if near else "", self.wire)
        return frames.pack(Kind.HELLO, self.run, self.rank, self.incarnation, tag)

    def check(self, frame: Frame, tag: Tag, peer: int | None = None) -> None:
        """BadFrame unless the other side is a worker (`peer`) of our run with our model and our version."""
        if frame.kind is Kind.REFUSE:
            raise BadFrame(f"it refused this worker: {tag[0] if tag else 'it did not say why'}")
        if frame.kind is not Kind.HELLO or len(tag) != 5 or tag[0] != "hello":
            raise BadFrame("it did not say hello")
        if tag[1] != self.version:
            raise BadFrame(f"it runs freewheel {tag[1]}, this worker {self.version}: install one version")
        if tag[2] != self.model:
            raise BadFrame("its model has other parameters")
        if tag[4] != self.wire:
            raise BadFrame(
                f"it sends vectors as {tag[4]}, this worker as {self.wire}: give all the same wire"
            )
        if frame.sender == self.rank or frame.sender >= self.world_size:
            raise BadFrame(f"it says to be worker {frame.sender} of {self.world_size}")
        if peer is not None and frame.sender != peer:
            raise BadFrame(f"it is worker {frame.sender}, not {peer}")
