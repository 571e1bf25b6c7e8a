"""What can happen to a ring, when, to whom; and the combinations that the tests run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from faults.inject import BEGIN, END, Moment
from faults.pairwise import covering_rows

LOST_RANK = 10.0  # s, in which a dead rank is noticed by all others
SILENT_RANK = 5.0  # s, beyond the timeout of the group, in which a silent one is
LONG, SHORT = 60.0, 4.0  # timeouts of groups: one that must not be what ends a wait, and one that must
PAUSE = 1.5  # s

KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 8 * MIB)  # bytes of one block, its keys and values: in one piece, or more than sockets hold


class Fault(NamedTuple):
    """What happens: something that the rank in question does to itself, or that is done while it waits."""

    action: str  # of inject.py; "hold" where the leader does the rest; none without a moment
    timeout: float  # of the group
    ends: str  # how the pass ends on the others: "lost" (soon), "silent" (at the timeout), "well"
    victim_ends: str  # and on the victim: "dead", "raises" (an error of its own), "RingError", "well"
    needs: str = ""  # what a machine may lack: "strace", "namespaces"


FAULTS = {
    "kill": Fault("kill", LONG, "lost", "dead"),
    "exit": Fault("exit", LONG, "lost", "dead"),
    "raise": Fault("raise", LONG, "lost", "raises"),
    "interrupt": Fault("hold", LONG, "lost", "raises"),  # Ctrl-C for a rank that waits for one that is held
    "aside": Fault("hold", 20.0, "well", "well"),  # Ctrl-C for a rank whose call waits in another than the main thread
    "destroy": Fault("hold", LONG, "lost", "RingError"),  # of the group, while its call waits for one that is held
    "stop": Fault("stop", SHORT, "silent", "RingError"),  # and continues when all others have given up
    "pause": Fault("stop", 20.0, "well", "well"),
    "slow": Fault("hold", 20.0, "well", "well"),
    "reset": Fault("hold", LONG, "lost", "RingError", "strace"),  # a read from a neighbour fails: ECONNRESET
    "cut": Fault("hold", SHORT, "silent", "RingError", "namespaces"),  # its link is down
    "flap": Fault("hold", 20.0, "well", "well", "namespaces"),  # its link is down for three seconds
    "rate": Fault("hold", 20.0, "well", "well", "namespaces"),  # its link is slow
    "midway": Fault("hold", LONG, "lost", "dead", "namespaces"),  # killed with half a message on a slow link
    "ambush": Fault("", LONG, "lost", "dead"),  # killed at any time, in one pass of many; the phase is only a number
    "": Fault("", 20.0, "well", "well"),  # nothing happens; for the jobs of cases
}

# The last phase of forward is after its last hop, of which others may still need something. Between the passes a rank
# is in no operator.
PHASES = ("header", "first", "middle", "last", "between", "backward")


# In the middle bytes are on their way. Elsewhere the others first come as far as they can without the victim, so that
# it is known where they are.
PATIENCE = {"middle": 0.0}
USUAL_PATIENCE = 0.2  # s


def moment(phase: str, P: int) -> Moment:
    """When a phase is reached. There are P - 1 hops in each direction; a hop is posted at the beginning of its step."""
    hops = P - 1
    return {
        "header": [("ringattn::ring_forward", BEGIN)],
        "first": [("ring step 0:", BEGIN)],
        "middle": [(f"ring step {hops // 2}:", BEGIN), ("c10d::recv_", END)],  # posted, and not waited for
        "last": [(f"ring step {hops - 1}:", END)],
        "backward": [(f"ring backward step {P // 2}:", BEGIN)],
    }[phase]


class Case(NamedTuple):
    fault: str
    phase: str
    P: int
    victim: int
    block: int = KIB
    job: str = ""  # what the ranks do beside or instead of the pass under the fault: see rank.py

    @property
    def what(self) -> Fault:
        return FAULTS[self.fault]

    @property
    def actor(self) -> int:
        """The rank that does something at the moment: it may be one that the victim waits for."""
        return (self.victim + 1) % self.P if self.fault in ("interrupt", "aside", "destroy") else self.victim

    @property
    def pause(self) -> float:
        return 3.5 if self.job == "warn" else PAUSE

    @property
    def patience(self) -> float:
        return PATIENCE.get(self.phase, USUAL_PATIENCE)

    @property
    def timeout(self) -> float:
        # A rank that raises between the passes, in its own code, and lives on, is silent.
        return SHORT if (self.fault, self.phase) == ("raise", "between") else self.what.timeout

    @property
    def ends(self) -> str:
        """As Fault.ends; "refused": the error of one rank is all ranks' error, and the group goes on."""
        if self.fault != "raise":
            return self.what.ends
        return {"header": "refused", "between": "silent"}.get(self.phase, self.what.ends)

    @property
    def bound(self) -> float:
        """Seconds from the fault in which the pass must end on the other ranks."""
        return {"silent": self.timeout + SILENT_RANK, "well": 40.0}.get(self.ends, LOST_RANK)

    def __str__(self) -> str:
        size = f"{self.block // MIB}MiB" if self.block >= MIB else f"{self.block // KIB}KiB"
        return "-".join(filter(None, [self.job, self.fault, self.phase, f"P{self.P}", f"rank{self.victim}", size]))


def _case(row: dict[str, Any]) -> Case:
    P = row["P"]
    return Case(row["fault"], row["phase"], P, {"0": 0, "middle": P // 2, "last": P - 1}[row["victim"]], row["block"])


def _parameters(faults: Sequence[str], phases: Sequence[str]) -> dict[str, Sequence[Any]]:
    return {"fault": faults, "phase": phases, "P": (2, 3, 4), "victim": ("0", "middle", "last"), "block": SIZES}


_BY_PHASE = [name for name, fault in FAULTS.items() if fault.action and name != "midway"]
_OF_LINKS = [name for name in _BY_PHASE if FAULTS[name].needs == "namespaces"]
MATRICES = (
    _parameters([name for name in _BY_PHASE if name not in _OF_LINKS], PHASES),
    _parameters(_OF_LINKS, ("header", "middle", "backward")),
)


def matrix(parameters: dict[str, Sequence[Any]], full: bool = False) -> list[Case]:
    """All combinations, or some in which all pairs of values occur."""
    names = list(parameters)
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*parameters.values())]
    return list(dict.fromkeys(map(_case, every if full else covering_rows(parameters))))
