"""The error of a ring."""

from __future__ import annotations


class RingError(RuntimeError):
    """The ranks of a ring disagree about a call (the same text on every rank), or the ring failed.

    Attributes, each None where it is unknown:
        rank: the rank of this process in the group.
        peer: the rank whose fault it is: it is lost, silent or failed, or it refused or alone has another value.
        group: the group's name.
        call: the number of the call on the group, from 1.
        hop: the hop of the pass that failed, from 0; None while the ranks compare their calls.
    """

    __module__ = "ringattn_ext"

    def __init__(
        self,
        text: str = "",
        *,
        rank: int | None = None,
        peer: int | None = None,
        group: str | None = None,
        call: int | None = None,
        hop: int | None = None,
    ) -> None:
        super().__init__(text)
        self.rank, self.peer, self.group, self.call, self.hop = rank, peer, group, call, hop
