"""Where a fault hits, with doubles of torch's objects; real ones are met in tests/procs/faults."""

import threading
from dataclasses import dataclass, field

import pytest

from everstep.errors import UsageError
from everstep.events import Notice
from everstep.faults import injectors, loop
from everstep.faults.calls import Calls
from everstep.faults.core import codec
from everstep.faults.core.plan import TYPES, PlannedFault, Spec
from everstep.faults.hooks import PEER_S, FaultHooks, arm
from everstep.faults.injectors import INJECTORS, InjectedFault
from everstep.recovery.link import LinkClosed


class Hooked:
    """Takes hooks as torch's objects do, and counts those that stand."""

    def __init__(self):
        self.hooks = {"pre": {}, "post": {}}

    def _register(self, when, hook):
        key = object()
        self.hooks[when][key] = hook
        owner = self

        class Handle:
            def remove(self):
                owner.hooks[when].pop(key, None)

        return Handle()

    def run(self, when, *args):
        for hook in tuple(self.hooks[when].values()):
            hook(*args)

    @property
    def standing(self):
        return sum(map(len, self.hooks.values()))


class Tensor(Hooked):
    requires_grad = True

    def register_hook(self, hook):
        return self._register("post", hook)


class Module(Hooked):
    def __init__(self, *children, output=None):
        super().__init__()
        self._children = children
        self.output = output

    def children(self):
        return self._children

    def modules(self):
        return [self, *(m for c in self._children for m in c.modules())]

    def register_forward_pre_hook(self, hook):
        return self._register("pre", hook)

    def register_forward_hook(self, hook):
        return self._register("post", hook)

    def __call__(self):
        self.run("pre", self, ())
        for child in self._children:
            child()
        self.run("post", self, (), self.output)


class Optimizer(Hooked):
    def register_step_pre_hook(self, hook):
        return self._register("pre", hook)

    def register_step_post_hook(self, hook):
        return self._register("post", hook)

    def step(self, log):
        self.run("pre", self, (), {})
        log.append("stepped")
        self.run("post", self, (), {})


@dataclass
class Agent:
    """Answers as it is told to; keeps what it was asked."""

    answer: str | None = "fault.go"
    asked: list = field(default_factory=list)

    def __call__(self, message, timeout_s):
        self.asked.append((message["kind"], message.get("index"), message.get("position"), timeout_s))
        return None if self.answer is None else {"kind": self.answer}


def fault(position, step=5, rank=0, kind="exception", index=0):
    return PlannedFault(index, step, rank, kind, position)


@dataclass
class World:
    plan: tuple
    rank: int = 0
    agent: Agent = field(default_factory=Agent)
    events: list = field(default_factory=list)
    log: list = field(default_factory=list)

    def __post_init__(self):
        self.grad = Tensor()
        self.leaves = [Module(output=self.grad if i == 1 else None) for i in range(3)]
        self.model = Module(*self.leaves, output={"loss": Tensor()})
        self.optimizer = Optimizer()
        self.hooks = FaultHooks(self.agent, self.rank, self.plan, self.events.append)
        self.hooks.attach([self.model], [self.optimizer])

    def step(self, step):
        self.log.clear()
        self.hooks.at_boundary(step)
        self.log.append("began")
        self.model()
        self.log.append("forward done")
        self.grad.run("post", None)
        self.log.append("backward done")
        self.optimizer.step(self.log)
        self.log.append("done")

    @property
    def standing(self):
        things = [*self.model.modules(), self.optimizer, self.grad]
        return sum(thing.standing for thing in things)


@pytest.mark.parametrize(
    ("position", "log"),
    [
        ("boundary", []),
        ("forward", ["began"]),
        ("backward", ["began", "forward done"]),
        ("optimizer", ["began", "forward done", "backward done", "stepped"]),
    ],
)
def test_hits_at_its_place_in_its_step_alone(position, log):
    world = World((fault(position),))
    for step in (1, 2, 3, 4):
        world.step(step)
        assert world.standing == 0
        assert world.agent.asked == []
    with pytest.raises(InjectedFault, match=f"injected fault 0: exception at step 5.*{position if log else 'between'}"):
        world.step(5)
    assert world.log == log
    assert world.agent.asked == [("fault.fire", 0, position, 10.0)]
    world.hooks.detach()
    assert world.standing == 0


@pytest.mark.parametrize("position", ["boundary", "forward", "backward", "optimizer"])
@pytest.mark.parametrize("answer", ["fault.no", None])
def test_no_harm_without_go_and_asked_once(position, answer):
    world = World((fault(position),), agent=Agent(answer))
    for step in range(1, 9):
        world.step(step)
        assert world.log[-1] == "done"
    assert len(world.agent.asked) == 1
    assert world.standing == 0
    assert [type(e) for e in world.events] == ([Notice] if answer is None else [])


def test_another_rank_s_fault_is_nothing_to_this_rank():
    world = World((fault("forward", rank=1), fault("boundary", rank=1, index=1)))
    for step in range(1, 9):
        world.step(step)
        assert world.standing == 0
    assert world.agent.asked == []


def test_a_peer_waits_before_its_own_optimizer_step():
    world = World((fault("optimizer", rank=1),), agent=Agent("fault.pass"))
    world.agent.asked = world.log  # one order for both
    world.step(5)
    assert world.log == [
        "began", "forward done", "backward done", ("fault.await", 0, None, PEER_S), "stepped", "done",
    ]  # fmt: skip
    world.step(6)
    assert world.standing == 0


def test_the_first_of_several_optimizers_counts():
    world = World((fault("optimizer"), fault("optimizer", step=6, rank=1, index=1)), agent=Agent("fault.no"))
    second = Optimizer()
    world.hooks.attach([world.model], [world.optimizer, second])
    for step in (5, 6, 7):
        world.step(step)
        second.step(world.log)
    assert [(kind, index) for kind, index, *_ in world.agent.asked] == [("fault.fire", 0), ("fault.await", 1)]
    assert second.standing == 0


@pytest.mark.parametrize("position", ["forward", "backward", "optimizer"])
def test_a_place_that_is_not_passed_hits_at_the_next_boundary(position):
    world = World((fault(position),))
    world.hooks.at_boundary(5)  # a step in which nothing is called
    with pytest.raises(InjectedFault, match="between steps"):
        world.hooks.at_boundary(6)
    assert world.agent.asked == [("fault.fire", 0, "boundary", 10.0)]
    assert f"passed no {position} hook" in world.events[0].text


@pytest.mark.parametrize("position", ["forward", "backward", "optimizer"])
def test_without_models_and_optimizers_it_hits_between_steps(position):
    world = World((fault(position),))
    world.hooks.attach([], [object()])
    with pytest.raises(InjectedFault):
        world.hooks.at_boundary(5)


def test_an_inner_module_that_is_not_called_is_made_up_for_by_the_model():
    for position, log in (("forward", ["began"]), ("backward", ["began", "forward done"])):
        world = World((fault(position),))
        world.model._children = ()
        world.model.modules = lambda world=world: [world.model, *world.leaves]
        world.model.output = (None, [{"logits": world.grad}])
        with pytest.raises(InjectedFault):
            world.step(5)
        assert world.log == log


def test_a_compiled_model_gets_no_inner_hook():
    world = World((fault("forward"), fault("forward", step=6, index=1)), agent=Agent("fault.no"))
    world.leaves[0]._orig_mod = object()
    world.hooks.at_boundary(5)
    assert all(leaf.standing == 0 for leaf in world.leaves)
    assert world.model.standing == 2
    world.model._compiled_call_impl = object()
    world.hooks.attach([world.model], [])
    world.hooks.at_boundary(6)
    assert world.standing == 0


def test_a_resumed_loop_does_not_make_up_for_old_steps():
    world = World((fault("forward", step=5), fault("boundary", step=8, index=1)), agent=Agent("fault.no"))
    for step in (7, 8, 9):
        world.step(step)
    assert [index for _, index, *_ in world.agent.asked] == [1]


ROWS = codec.rows([fault("forward")])


class Line:
    def __init__(self, reply):
        self.reply, self.asked = reply, []

    def __call__(self, message, timeout_s):
        self.asked.append(message)
        return self.reply


def test_arm_uses_what_the_roster_told():
    line = Line(None)
    assert arm({}, line, 0, 100, [].append) is None
    assert arm({"rows": []}, line, 0, 100, [].append) is None
    assert isinstance(arm({"rows": ROWS}, line, 0, 100, [].append), FaultHooks)
    assert line.asked == []


def test_arm_asks_where_the_plan_depends_on_the_steps():
    line = Line({"kind": "fault.plan", "rows": ROWS})
    assert isinstance(arm({"rows": None}, line, 0, 100, [].append), FaultHooks)
    assert line.asked == [{"kind": "fault.total", "steps": 100}]


def test_arm_hands_on_what_the_script_asked_for(monkeypatch):
    spec = Spec(2, 3)
    monkeypatch.setattr("everstep.faults.flags.script_spec", lambda: spec)
    line = Line({"kind": "fault.plan", "rows": ROWS})
    assert isinstance(arm({}, line, 0, 100, [].append), FaultHooks)
    assert codec.spec_from_json(line.asked[0]["asked"]) == spec


def test_arm_raises_what_the_agent_refuses():
    with pytest.raises(UsageError, match="does not fit"):
        arm({"rows": None}, Line({"kind": "fault.bad", "text": "does not fit"}), 0, 9, [].append)
    with pytest.raises(UsageError, match="did not come"):
        arm({"rows": None}, Line(None), 0, 9, [].append)


def test_questions_and_answers():
    sent = []
    calls = Calls(lambda message: (sent.append(message), calls.deliver({"kind": "fault.go", "call": message["call"]})))
    assert calls.call({"kind": "fault.fire"}, 5) == {"kind": "fault.go", "call": 1}
    assert calls.call({"kind": "fault.fire"}, 5) == {"kind": "fault.go", "call": 2}
    calls.deliver({"kind": "fault.go", "call": 1})  # late: nobody waits
    calls.deliver({"kind": "fault.go"})
    assert calls._open == {}


def test_no_answer_is_none():
    assert Calls(lambda _: None).call({"kind": "x"}, 0.001) is None

    def gone(_):
        raise LinkClosed("gone")

    assert Calls(gone).call({"kind": "x"}, 5) is None


def test_an_answer_finds_its_asker_among_threads():
    sent, ready = [], threading.Semaphore(0)
    calls = Calls(lambda message: (sent.append(message), ready.release()))
    got = {}
    threads = [threading.Thread(target=lambda n=n: got.update({n: calls.call({"n": n}, 5)})) for n in range(8)]
    for thread in threads:
        thread.start()
    for _ in threads:
        ready.acquire()
    for message in reversed(sent):
        calls.deliver({"n": message["n"], "call": message["call"]})
    for thread in threads:
        thread.join()
    assert all(got[n]["n"] == n for n in range(8))


def test_every_type_has_its_injector():
    assert list(INJECTORS) == list(TYPES)
    with pytest.raises(MemoryError, match="why"):
        injectors.inject("memory", "why")


def test_a_loop_of_one_s_own_is_connected_and_let_go():
    world = World(())
    loop.connect({"rows": ROWS}, world.agent, 0, world.events.append)
    try:
        loop.maybe_fail(4)
        with pytest.raises(InjectedFault):
            loop.maybe_fail(5)
    finally:
        loop.disconnect()
    loop.maybe_fail(5)  # nothing asked, no agent: nothing
    loop.disconnect()
