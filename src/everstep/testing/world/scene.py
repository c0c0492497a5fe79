"""What a simulated world consists of besides its actors: the setting drawn from a seed, the bag of moves, the board.

The bag is the network and the scheduler in one: every message on its way, every step that a process could take, is a
move in it, and any one of them may be next. A move of a slow actor is put back most times it is drawn.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace

from everstep.recovery.core.state import Phase
from everstep.recovery.core.words import Incarnation, Policy, Roster

FOREVER = 1e9
TROUBLES = ("starved", "sickly", "lost", "mute", "unwrapped", "end", "laggard")
HOLD_UPS, HELD_UP = 0.05, 0.97
Move = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """One kind of world."""

    seed: int
    ranks: int = 3
    nodes: int = 1
    spares: int = 1  # on each node
    idle_nodes: int = 0  # nodes that have spares only
    steps: int = 2  # of the function; each is a collective
    harms: int = 3  # how often the adversary does harm, at most
    policy: Policy = field(default_factory=lambda: Policy(3))
    unwrapped: bool = False  # a script that does not know us: a stop kills it, its exit with 0 completes it
    starved: bool = False  # once running, no fresh process ever starts
    hale: bool = False  # no fresh process fails to start, no health check fails
    sickly: bool = False  # half of the fresh processes fail at once
    lost_checkpoints: bool = False  # the last intended checkpoint never becomes durable
    mute: bool = False  # once running, the board answers nobody
    end_wanted: bool = False  # somebody asks for the end on the way
    focus: Phase = Phase.RUNNING  # the adversary prefers to do harm when some agent stands there
    slow_drain: float = 0.0  # chance that the end of draining is put off when drawn
    slowness: tuple[float, ...] = (0.0,)  # of each node's agent: chance that its move is put off when drawn

    @classmethod
    def drawn(cls, seed: int, ranks: int | None = None) -> "Setting":
        """Draw a setting from a seed."""
        rng = random.Random(seed)
        size = ranks or rng.choice((1, 2, 2, 3, 3, 4, 8))
        nodes = min(size, rng.choice((1, 2, 2, 3)))
        idle = rng.choice((0, 0, 1)) if nodes > 1 else 0
        laggard = rng.choice((0.6, 0.95, 0.98))
        (trouble,) = rng.choices(("", *TROUBLES), (50, 5, 5, 5, 5, 10, 15, 5))
        lags = trouble == "laggard"  # a node of spares that hears of everything last
        if lags:
            nodes, idle, laggard = 1, 1, 0.99
        (patience,) = rng.choices(("endless", "counted", "default"), (70, 15, 15))
        policy = Policy(
            size,
            max_restarts=rng.randrange(4) if patience == "counted" else None,
            same_step_limit=3 if patience == "default" else 1000,
            patience=5 if patience == "default" else 1000,
            deaf=trouble == "unwrapped",
            stop_deadline_s=10.0,
            start_deadline_s=30.0 if trouble in ("starved", "mute") else FOREVER,
            drain_deadline_s=60.0 if trouble == "lost" else FOREVER,
        )
        return cls(
            seed,
            size,
            nodes,
            spares=rng.choice((0, 1, 1, 2)),
            idle_nodes=idle,
            steps=1 if lags else rng.choice((1, 2, 4)),
            harms=rng.choice((0, 2, 3, 5, 8)),
            policy=policy,
            unwrapped=trouble == "unwrapped",
            starved=trouble == "starved",
            sickly=trouble == "sickly",
            lost_checkpoints=trouble == "lost",
            mute=trouble == "mute",
            end_wanted=trouble == "end",
            focus=Phase.DRAINING if lags else rng.choice([p for p in Phase if p is not Phase.ENDED]),
            slow_drain=0.9997 if lags else rng.choice((0.0, 0.9)),
            slowness=(*(rng.choice((0.0, 0.0, 0.6, 0.95)) for _ in range(nodes)), laggard),
        )

    @classmethod
    def shrinking(cls, seed: int, ranks: int | None = None) -> "Setting":
        """Draw a setting whose world may shrink, in which replacements often do not come."""
        drawn, rng = cls.drawn(seed, ranks), random.Random(f"shrinking {seed}")
        starved, awaited_s = rng.choice((True, True, False)), rng.choice((None, 0.0, 20.0))
        policy = replace(
            drawn.policy,
            min_world_size=rng.randint(1, drawn.ranks),
            replace_deadline_s=awaited_s,
            start_deadline_s=30.0 if drawn.mute or (starved and awaited_s is None) else FOREVER,
        )
        return replace(drawn, policy=policy, starved=starved, spares=rng.choice((0, 0, 1)))

    def share(self, node: int) -> int:
        """Return how many ranks a node starts with."""
        return 0 if node >= self.nodes else len(range(node, self.ranks, self.nodes))


class Scene:
    """The bag of moves, the clock, the board that agents share, and the story so far."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rng = random.Random(f"world {setting.seed}")
        self.now = 0.0
        self.board: dict[int, Roster] = {}
        self.done = 0  # steps that every rank has done
        self.start_of: dict[int, int] = {}  # generation → step from which it goes on
        self._bag: list[tuple[float, Move]] = []
        self._story: deque[tuple[object, ...]] = deque(maxlen=60)

    def soon(self, move: Move, slowness: float = 0.0) -> None:
        """Put a move into the bag; now and then one is held up for no reason."""
        self._bag.append((HELD_UP if self.rng.random() < HOLD_UPS else slowness, move))

    def draw(self) -> bool:
        """Make any one of the moves in the bag; False when there is none."""
        if not self._bag:
            return False
        while True:
            at = self.rng.randrange(len(self._bag))
            slowness, move = self._bag[at]
            if not slowness or self.rng.random() >= slowness or len(self._bag) == 1:
                break
        self._bag[at] = self._bag[-1]
        self._bag.pop()
        move()
        return True

    def chance(self, share: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < share

    def tell(self, *words: object) -> None:
        """Add to the story."""
        self._story.append(words)

    def story(self) -> str:
        """Return the setting and the last moves."""
        return "\n".join([str(self.setting), *(" ".join(map(_brief, words)) for words in self._story)])


def _brief(word: object) -> str:
    """Print a word of the story; what is the same everywhere is left out."""
    if isinstance(word, Roster):
        listed = ", ".join(f"{m.rank}: {m.incarnation} {m.why}" for m in word.members)
        return f"roster {word.generation} [{listed or 'the end'}]"
    if isinstance(word, Incarnation) or not is_dataclass(word):
        return str(word)
    inside = (_brief(getattr(word, f.name)) for f in fields(word) if getattr(word, f.name) != f.default)
    return f"{type(word).__name__}({', '.join(inside)})"
