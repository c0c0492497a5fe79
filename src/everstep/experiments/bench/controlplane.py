"""`everstep bench controlplane`: from the fact of a fault to the next roster at every agent, at several sizes.

A real store's host, and processes that hold the clients: one agent a node for ours (`bench.agents`), one client a rank
for NVRx's barrier (`bench.alone.barrier`). All on this machine, so that what is spread over hundreds of machines in a
cluster shares its cores here: the figures are an upper bound of what the store and the protocol cost, without the
network's own time.

Rule 1: every wait has a limit; a size that does not come to its end is told as such, and the next is tried.
Rule 2: the host is made anew for each size; the processes of clients stay, since torch's import takes seconds.
"""

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from everstep import environ
from everstep.clock import SYSTEM
from everstep.errors import EverstepError
from everstep.experiments.bench.inprocess import machine
from everstep.experiments.core.figures import SIZES, growth, spread
from everstep.process.kernel import raise_files_limit
from everstep.recovery.link import Link
from everstep.telemetry import say

BUDGET_RANKS, BUDGET_S, LINEAR = 4096, 1.0, 1.0
BARRIER = Path(__file__).parent / "alone" / "barrier.py"
_HOST = (
    "import sys; from everstep.recovery.link import Link; from everstep.store import host; "
    "host.main(Link.from_fd(int(sys.argv[1])))"
)


_QUIET = {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1"}
"""Torch looks up a name for every connection, and a resolver's lost packet would cost 5 s of connecting each time."""


class TooLate(EverstepError):
    """A size has not come to its end within its limit."""


class Clients:
    """Processes that hold clients, of one size after another; started when first needed, and again after a failure.

    `planner`: the first client has a process to itself, for it does what no other does, one call after another.
    """

    def __init__(self, command: Sequence[str], processes: int, limit_s: float, *, planner: bool = False) -> None:
        self._command, self._processes, self._limit_s, self._planner = command, processes, limit_s, planner
        self._children: list[subprocess.Popen[bytes]] = []
        self._unread: list[bytes] = []
        self._used: list[int] = []  # which of them hold clients of the present size
        self._deadline = 0.0

    def begin(self, count: int, size: Mapping[str, object]) -> None:
        """Have `count` clients of a size connect, as evenly spread as can be; return when all have."""
        if not self._children:
            values = environ.snapshot() | _QUIET
            self._children = [
                subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=values)
                for _ in range(self._processes)
            ]
            self._unread = [b""] * self._processes
        self._deadline = SYSTEM.now() + self._limit_s
        split = shares(count, self._processes, first_alone=self._planner)
        self._used = list(range(len(split)))
        for number, (first, last) in enumerate(split):
            self._say(number, {"size": {**size, "first": first, "last": last, "limit": self._limit_s}})
        self._hear()

    def round(self, number: int) -> dict[str, Any]:
        """Do a round: the first process has the one that sets the fact. Return the latest of each time over all."""
        self._say(0, {"go": number})
        said = self._hear()
        return {name: max(s[name] for s in said if name in s) for name in {name for s in said for name in s}}

    def _say(self, number: int, message: Mapping[str, object]) -> None:
        pipe = self._children[number].stdin
        assert pipe is not None, "it was opened with a pipe"
        pipe.write(json.dumps(message).encode() + b"\n")

    def _hear(self) -> list[dict[str, Any]]:
        return [self._line(number) for number in self._used]

    def _line(self, number: int) -> dict[str, Any]:
        pipe = self._children[number].stdout
        assert pipe is not None, "it was opened with a pipe"
        while b"\n" not in self._unread[number]:
            left = self._deadline - SYSTEM.now()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise TooLate(f"no end within {self._limit_s:g} s")
            part = os.read(pipe.fileno(), 1 << 16)
            if not part:
                raise TooLate(f"a process of clients ended with {self._children[number].wait()}; see what it printed")
            self._unread[number] += part
        line, _, self._unread[number] = self._unread[number].partition(b"\n")
        return json.loads(line)  # type: ignore[no-any-return]

    def end(self) -> None:
        """End them: whom they hold are simulated."""
        children, self._children = self._children, []
        for child in children:
            child.kill()
            child.communicate()


@contextlib.contextmanager
def hosted() -> Generator[tuple[str, int, Link]]:
    """Serve a store, as the product serves it: in a process of its own, at the end of a line."""
    ours, theirs = Link.pair()
    words = [sys.executable, "-c", _HOST, str(theirs.fileno())]
    child = subprocess.Popen(words, pass_fds=[theirs.fileno()], env=environ.snapshot() | _QUIET)
    theirs.close()
    try:
        said, _ = ours.receive()
        yield str(said["host"]), int(said["port"]), ours
    finally:
        ours.close()
        child.kill()
        child.wait()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every size; return the result as plain values."""
    raise_files_limit()
    own = args.python is not None
    agents = Clients(
        [sys.executable, "-m", "everstep.experiments.bench.agents"], args.processes, args.limit, planner=True
    )
    theirs = Clients([args.python or sys.executable, str(BARRIER), *["--own"] * own], args.processes, args.limit)
    begun = machine()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(agents.end)
        stack.callback(theirs.end)
        for ranks in sizes(args.ranks):
            nodes = -(-ranks // args.per_node)
            row: dict[str, Any] = {"ranks": ranks, "nodes": nodes, "arrivals": args.arrivals}
            row["ours"] = _tried(f"{ranks} ranks on {nodes} nodes", agents, partial(ours, args, ranks, nodes))
            if not args.without_barrier:
                row["barrier"] = _tried(f"NVRx's barrier, {ranks} ranks", theirs, partial(barrier, args, ranks))
            rows.append(row)
    return {
        "bench": "controlplane",
        "machine": begun | {"load_at_end": os.getloadavg()[0]},
        "barrier_by": "NVRx's barrier: " + ("its own code" if own else "its store traffic alone, by description"),
        "rows": rows,
        "growth": {
            "fault to next roster": _growth(rows, "ours"),
            "NVRx, fault to past its barrier": _growth(rows, "barrier"),
        },
        "verdicts": judged(rows),
    }


def sizes(given: Sequence[int]) -> list[int]:
    """Return the sizes to measure: those given, or the usual ones up to the one given."""
    return [*(s for s in SIZES if s < given[0]), given[0]] if len(given) == 1 else list(given)


def _tried(what: str, clients: Clients, call: Callable[[Clients], dict[str, Any]]) -> dict[str, Any] | None:
    """Measure one size; where it does not come to its end, say so and go on."""
    try:
        found = call(clients)
    except (EverstepError, OSError) as error:
        clients.end()
        say(f"bench: {what}: {error}")
        return None
    say(f"bench: {what}: {found['whole_s'][0]:.3f} s; {found['setup_s']:.1f} s to connect")
    return found


def shares(count: int, processes: int, *, first_alone: bool = False) -> list[tuple[int, int]]:
    """Split `count` things over processes, as evenly as can be; none is left without any."""
    if first_alone and min(processes, count) > 1:
        return [(0, 1), *((a + 1, b + 1) for a, b in shares(count - 1, processes - 1))]
    processes = min(processes, count)
    ends = [count * number // processes for number in range(processes + 1)]
    return list(pairwise(ends))


def ours(args: argparse.Namespace, ranks: int, nodes: int, clients: Clients) -> dict[str, Any]:
    """Measure our protocol at one size."""
    size = {"ranks": ranks, "per_node": args.per_node, "arrivals": args.arrivals}
    setup, rounds = _rounds(args, clients, nodes, size)
    agent = statistics.median(r["agent"] for r in rounds)
    names = ("told", "arrived", "collected", "decided", "published", "read")
    ends = [ladder([r["set"], *(r[name] for name in names)]) for r in rounds]
    parts = {name: statistics.median(end[at] for end in ends) for at, name in enumerate(names)}
    return {
        "whole_s": spread([sum(end) + agent for end in ends]),
        "parts_s": parts,
        "agent_s": agent,
        "bytes": int(rounds[-1]["bytes"]),
        "setup_s": setup,
        "rounds": len(rounds),
    }


def barrier(args: argparse.Namespace, ranks: int, clients: Clients) -> dict[str, Any]:
    """Measure NVRx's barrier at one size."""
    setup, rounds = _rounds(args, clients, ranks, {"ranks": ranks})
    ends = [ladder([r["set"], r["told"], r["past"]]) for r in rounds]
    parts = {name: statistics.median(end[at] for end in ends) for at, name in enumerate(("told", "barrier"))}
    return {"whole_s": spread([sum(end) for end in ends]), "parts_s": parts, "setup_s": setup, "rounds": len(rounds)}


def ladder(marks: Sequence[float]) -> list[float]:
    """Return the lengths between marks; no part ends before the one that it follows."""
    found: list[float] = []
    top = marks[0]
    for mark in marks[1:]:
        found.append(max(0.0, mark - top))
        top = max(top, mark)
    return found


def _rounds(
    args: argparse.Namespace, clients: Clients, count: int, size: Mapping[str, object]
) -> tuple[float, list[dict[str, Any]]]:
    """Connect the clients and do all rounds; return the seconds of the first, and what each round said.

    After each the host forgets what is past, as its agent would have it do: that falls into the next round.
    """
    began = SYSTEM.now()
    with hosted() as (host, port, line):
        clients.begin(count, {**size, "host": host, "port": port, "rounds": args.rounds})
        setup = SYSTEM.now() - began
        said: list[dict[str, Any]] = []
        for number in range(args.rounds):
            said.append(clients.round(number))
            if "arrivals" in size:  # NVRx's has nothing that could be forgotten
                line.send({"kind": "store.forget", "epoch": 0, "generation": number + 1})
        return setup, said


def _growth(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return growth([(r["ranks"], r[name]["whole_s"][0]) for r in rows if r.get(name)])


def judged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Judge the budget: a second at 4,096 ranks, and growth no worse than linear from size to size."""
    known = [(r["ranks"], r["ours"]["whole_s"][0]) for r in rows if r["ours"]]
    found: list[dict[str, Any]] = []
    for ranks, seconds in known:
        if ranks >= BUDGET_RANKS:
            text = f"{seconds:.3f} s, promised {BUDGET_S:g}"
            found.append({"ranks": ranks, "budget_kept": seconds <= BUDGET_S, "budget": text})
    steep = growth(known)
    if steep is not None:
        text = f"grows as ranks to the power of {steep:.2f}, promised {LINEAR:g} at most"
        found.append({"ranks": known[-1][0], "budget_kept": steep <= LINEAR, "budget": text})
    return found + [{"ranks": r["ranks"], "budget_kept": False, "budget": "no end"} for r in rows if not r["ours"]]
