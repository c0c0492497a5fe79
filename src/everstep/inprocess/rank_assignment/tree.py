"""`Tree`: ranks by a topology of layers, kept from iteration to iteration.

Rule 1: each call is one exchange: every rank says its keys, and whether it knows the tree. Where somebody does not (a
        spare has taken a rank over), all build it anew from the present ranks; so all answers are always alike.
Rule 2: a tree cannot be composed with filters: its layers say who is active.
"""

import enum
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from everstep.inprocess.rank_assignment.context import (
    EXCHANGE_TIMEOUT,
    KeyOrFn,
    RankAssignment,
    RankAssignmentCtx,
    key_of,
    remaining,
)
from everstep.inprocess.rank_assignment.pipeline import discarded
from everstep.inprocess.rank_assignment.topology import Topology
from everstep.inprocess.state import Mode, State


class LayerFlag(enum.Flag):
    """Where a replacement for a lost rank may be looked for."""

    RESERVE = enum.auto()  # up through this layer, for an inactive rank
    BACKFILL = enum.auto()  # up through this layer, for an active one


@dataclass
class Layer:
    """One level of the topology, the root first."""

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: KeyOrFn = ""
    flag: LayerFlag | None = None

    @property
    def reserves(self) -> bool:
        """See `topology.Limits.reserves`."""
        return self.flag is not None and LayerFlag.RESERVE in self.flag

    @property
    def backfills(self) -> bool:
        """See `topology.Limits.backfills`."""
        return self.flag is not None and LayerFlag.BACKFILL in self.flag


class Tree(RankAssignment):
    """Assigns ranks by `layers`; `world_size_filter` says how many of so many active ones may run the function."""

    def __init__(self, layers: list[Layer], world_size_filter: Callable[[int], int] | None = None) -> None:
        if not layers:
            raise ValueError("Tree(layers=[]): give at least the root layer, whose key is the same on every rank.")
        self.layers, self.world_size_filter = layers, world_size_filter
        self._topology: Topology | None = None
        self._present: list[int] = []  # first numbers, by present rank

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """See `RankAssignment.__call__`."""
        state, left = ctx.state, remaining(ctx)
        if state.rank is None or state.rank not in left:
            raise discarded(ctx)
        known = self._topology is not None and len(self._present) == state.world_size
        mine = json.dumps({"keys": [key_of(layer.key_or_fn, state) for layer in self.layers], "known": known})
        said = ctx.store.exchange("tree", state.rank, mine, left, EXCHANGE_TIMEOUT)
        told = {rank: json.loads(text) for rank, text in said.items()}
        if self._topology is not None and all(one["known"] for one in told.values()):
            topology, me = self._topology, self._present[state.rank]
            topology.lose([self._present[rank] for rank in ctx.terminated_ranks], self.world_size_filter)
        else:
            topology, me = self._build(state, {rank: one["keys"] for rank, one in told.items()}), state.rank
        self._topology = topology
        self._present = [leaf.first for leaf in topology.living()]
        if me not in self._present:
            ctx.terminated_ranks = set(range(state.world_size)) - set(self._present)
            raise discarded(ctx, "its group has too few ranks left, or it is lost")
        ctx.state, ctx.terminated_ranks = self._placed(state, topology, me), set()
        return ctx

    def _build(self, state: State, keys: dict[int, Sequence[str]]) -> Topology:
        topology = Topology(self.layers, keys)
        if state.rank == min(keys) and not topology.ordered():
            warnings.warn(
                "Tree: ranks do not follow the topology; start them host by host, and rack by rack, so that "
                "neighbours in rank are neighbours in the network.",
                stacklevel=3,
            )
        topology.start(self.world_size_filter)
        return topology

    def _placed(self, state: State, topology: Topology, me: int) -> State:
        active = {leaf.first: leaf.active for leaf in topology.active()}
        return replace(
            state,
            rank=self._present.index(me),
            world_size=len(self._present),
            active_rank=active.get(me),
            active_world_size=len(active),
            mode=Mode.ACTIVE if me in active else Mode.INACTIVE,
        )
