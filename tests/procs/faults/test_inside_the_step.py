"""FI-03 and the places inside a step, with real models, a real agent's side and real lines between them."""

import contextlib
import json
import selectors
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from everstep.clock import SYSTEM
from everstep.faults.companion import FaultCompanion
from everstep.faults.core import codec
from everstep.faults.core.plan import Plan, PlannedFault
from everstep.faults.flags import Request
from everstep.recovery.link import Link, LinkClosed

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]
STEP, INJURED = 6, 1
PLACES = ("forward", "backward", "optimizer", "boundary")
WRAPS = ("fsdp2", "ddp")


class Agent:
    """As much of an agent as the companion needs."""

    clock = SYSTEM
    world_size = 2

    def __init__(self, run_dir, links):
        self.run_dir, self.links, self.events, self.due = str(run_dir), links, [], None

    def send(self, rank, message, fds=()):
        with contextlib.suppress(LinkClosed):
            self.links[rank].send(message, fds)

    def emit(self, event):
        self.events.append((self.clock.now(), event))

    def later(self, delay_s):
        self.due = self.clock.now() + delay_s

    def recheck(self):
        pass


def serve(companion, agent):
    """Run the agent's loop until both lines have closed."""
    with selectors.DefaultSelector() as selector:
        for rank, link in enumerate(agent.links):
            selector.register(link, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select(0.01):
                try:
                    message, fds = agent.links[key.data].receive()
                    companion.on_message(key.data, message, fds)
                except LinkClosed:
                    selector.unregister(key.fileobj)
            companion.on_tick(agent.clock.now())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every case's log, by name: a list of [time, rank, what, …]; and the events of its agent."""
    folder = tmp_path_factory.mktemp("ranks")
    cases, servers, theirs_of_all = [], [], []
    for wrap in WRAPS:
        for place in (None, *PLACES):
            plan = Plan(() if place is None else (PlannedFault(0, STEP, INJURED, "exception", place),))
            pairs = [Link.pair() for _ in range(2)]
            name = f"{wrap}-{place}"
            agent = Agent(folder / f"{name}.run", [ours for ours, _ in pairs])
            companion = FaultCompanion(Request(plan=plan), show=lambda text: None)
            companion.start(agent)
            theirs_of_all += [theirs for _, theirs in pairs]
            told = {} if place is None else {"rows": codec.rows(plan.faults)}
            cases.append({"name": name, "wrap": wrap, "links": [t.fileno() for _, t in pairs], "told": told})
            servers.append((name, companion, agent))
    words = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(folder), *map(json.dumps, cases)]
    with subprocess.Popen(words, pass_fds=[end.fileno() for end in theirs_of_all]) as process:
        for end in theirs_of_all:
            end.close()
        for _, companion, agent in servers:
            serve(companion, agent)
            for link in agent.links:
                link.close()
        assert process.wait(60) == 0
    found = {}
    for name, _, agent in servers:
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        found[name] = (sorted(lines), agent.events)
    return found


def of(log, rank, *whats):
    return [entry[2:] for entry in log if entry[1] == rank and entry[2] in whats]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("place", PLACES)
def test_hits_once_at_its_place_on_its_rank(runs, wrap, place):
    log, events = runs[f"{wrap}-{place}"]
    assert [(e.fault, e.step, e.injured_rank, e.position) for _, e in events] == [(0, STEP, INJURED, place)]
    inside = of(log, INJURED, "began", "forward", "backward", "stepped", "loss", "raised")
    at = [what for what, step, *_ in inside if step == STEP]
    before = {"boundary": [], "forward": ["began"], "backward": ["began", "forward"]}
    assert at == [*before.get(place, ["began", "forward", "backward", "stepped"]), "raised"]
    assert of(log, 0, "raised") == []


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_perturbed_before_it(runs, wrap, place):
    """Losses, the random stream and the number of threads are those of the run without an injector, bit for bit."""
    twin, _ = runs[f"{wrap}-None"]
    log, _ = runs[f"{wrap}-{place}"]
    for rank in (0, 1):
        for what in ("random", "loss"):
            mine, other = of(log, rank, what), of(twin, rank, what)
            assert len(mine) >= STEP - 1
            assert mine == other[: len(mine)]
    assert of(twin, 0, "finished")


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_peer_steps_after_the_injured_rank_has_stepped_and_was_hit(runs, wrap):
    log, events = runs[f"{wrap}-optimizer"]
    times = defaultdict(dict)
    for at, rank, what, *rest in log:
        if rest and rest[0] == STEP:
            times[rank][what] = at
    assert times[INJURED]["stepped"] < events[0][0] < times[INJURED]["raised"] < times[0]["stepped"]
    assert times[0]["stepped"] - times[INJURED]["stepped"] < 2.0


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("place", PLACES)
def test_within_half_a_second_and_nothing_left(runs, wrap, place):
    log, events = runs[f"{wrap}-{place}"]
    raised = next(at for at, rank, what, *_ in log if what == "raised")
    assert 0 <= raised - events[0][0] < 0.5
    assert of(log, INJURED, "threads") == [["threads", 1]]
    assert of(log, INJURED, "standing") == [["standing", 0]]
