"""`everstep.inprocess.Wrapper` under `everstep run`: callbacks, places, marks and ends, with real processes."""

import re
import socket
from pathlib import Path

import pytest

pytestmark = pytest.mark.procs

HERE = Path(__file__).parent
HEAD = (HERE / "wrapper_head.txt").read_text()


def by_rank(ended, *names):
    """What each rank was told, in the order in which it was."""
    found = {}
    for line in ended.notes:
        if line["what"] in names:
            found.setdefault(line["of"], []).append((line["what"], line["iteration"]))
    return found


ORDER = """
calls = dict(
    initialize=telling("initialize", "Initialize", "initialize"), abort=Compose(
        telling("abort", "Abort", "abort"), inprocess.abort.AbortTorchDistributed()),
    finalize=telling("finalize", "Finalize", "finalize"), health_check=telling("health_check", "HealthCheck", "health"),
    completion=telling("completion", "Completion", "completion"),
    terminate=telling("terminate", "Terminate", "terminate"),
)
@Wrapper(**calls, soft_timeout=seconds(2), hard_timeout=seconds(30))
def train(call: CallWrapper):
    rank = int(os.environ["RANK"])
    note("enter", iteration=call.iteration, of=rank)
    meet()
    for _ in range(3):
        dist.barrier()
    if call.iteration == 0 and rank == 1: raise ValueError("boom")
    if call.iteration == 1 and rank == 0: raise ValueError("boom on rank 0")
    if call.iteration == 2 and rank == 2: time.sleep(3600)
    dist.barrier()
    return 10 * rank
note("returned", value=train())
"""


def test_callbacks_come_in_nvrxs_order_on_every_rank(start):
    """Exceptions on a rank and on rank 0, a hang in sleep: nobody is lost (W2, W3), and all hear it alike."""
    ended = start(HEAD + ORDER, "--nproc-per-node", "4").ended(120)
    assert ended.code == 0, ended.err
    assert sorted(n["value"] for n in ended.of("returned")) == [0, 10, 20, 30]
    assert len({n["pid"] for n in ended.of("enter")}) == 4, "every process was kept"
    entry, leaving = ["initialize", "health", "enter"], ["abort", "finalize", "health"]
    for rank, told in by_rank(ended, *entry, *leaving, "completion", "terminate").items():
        expected = [(name, i) for i in range(3) for name in (*entry, *leaving)]
        assert told == [*expected, *((name, 3) for name in entry), ("completion", 3)], rank
    raised = [(n["of"], n["iteration"]) for n in ended.of("health") if n["raised"] == "ValueError"]
    assert raised == [(1, 0), (0, 1)], "the health check hears what the function raised on its own rank"
    kinds = [f["kind"] for f in ended.events("FaultNoticed")]
    assert kinds == ["exception", "exception", "stall"]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ported():
    """The script after the one command that the page on compatibility gives."""
    text = (HERE / "nvrx_script.py").read_text()
    text = re.sub(r"nvidia_resiliency_ext\.checkpointing", "everstep.checkpoint", text)
    return re.sub(r"nvidia_resiliency_ext", "everstep", text)


def test_a_script_for_nvrx_runs_after_its_imports_are_changed(start):
    """Own store, prefixes and port as NVRx's users needed them; exceptions, a hang, and a kill that NVRx's world
    shrinks by (W5): here a spare takes the rank over and the world keeps its size.
    """
    job = start(ported(), "--nproc-per-node", "2", wrapped=None, env={"OWN_PORT": str(free_port())})
    ended = job.ended(120)
    assert ended.code == 0, ended.err
    assert sorted(n["value"] for n in ended.of("returned")) == [0, 1]
    assert max(n["step"] for n in ended.of("step")) == 19
    assert max(n["iteration"] for n in ended.of("enter")) == 4
    assert {n["world"] for n in ended.of("initialize")} == {2}
    assert len({n["pid"] for n in ended.of("enter") if n["rank"] == 0}) == 1
    assert len({n["pid"] for n in ended.of("enter") if n["rank"] == 1}) == 2
    assert ended.of("finalize")


PLACES = """
def assigned():
    if KIND == "max":
        return Compose(ra.MaxActiveWorldSize(2), ra.ShiftRanks())
    if KIND == "tree":
        return ra.Tree([ra.Layer(key_or_fn="job"), ra.Layer(max_ranks=1, key_or_fn=lambda s: str(s.rank // 2))])
    class Discards(ra.RankAssignment):
        def __call__(self, ctx):
            if ctx.state.rank == 1: raise ra.RankDiscarded("rank 1 is not wanted")
            ctx = ra.ActivateAllRanks()(ctx)
            ctx.state.active_rank, ctx.state.active_world_size = {0: 0, 2: 1, 3: 2}[ctx.state.rank], 3
            return ctx
    return Discards()
@Wrapper(rank_assignment=assigned(), initialize=telling("initialize", "Initialize", "initialize"))
def train(call: CallWrapper):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meet()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    note("enter", iteration=call.iteration, world=world)
    dist.barrier()
    if call.iteration == 0 and rank == 1: raise ValueError("boom")
    if call.iteration == 1 and rank == 0: os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return rank
note("returned", value=train())
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "active"), [("max", {0: 0, 1: 1}), ("tree", {0: 0, 2: 1}), ("discards", {0: 0, 2: 1, 3: 2})]
)
def test_ranks_in_reserve_wait_and_the_others_see_a_smaller_world(start, kind, active):
    """Inactive and discarded ranks return None, with all others; a group of plain `init_process_group` meets."""
    text = (HEAD + PLACES).replace("KIND", repr(kind))
    ended = start(text, "--nproc-per-node", "4").ended(120)
    assert ended.code == 0, ended.err
    assert {n["world"] for n in ended.of("enter")} == {len(active)}
    values = sorted((n["value"] for n in ended.of("returned")), key=str)
    assert values == sorted([*active.values(), *[None] * (4 - len(active))], key=str)
    assert max(n["iteration"] for n in ended.of("enter")) == 2
    told = {(n["of"], n["active"]) for n in ended.of("initialize")}
    assert {(r, a) for r, a in told if a is not None} == set(active.items())


ENDS = """
calls = dict(terminate=telling("terminate", "Terminate", "terminate"))
if KIND == "retries":
    calls["initialize"] = inprocess.initialize.RetryController(max_iterations=3)
if KIND == "unfit":
    calls["health_check"] = telling("health_check", "HealthCheck", "health",
                                    lambda s: once("unfit", 1) and s.iteration == 0 and 1 / 0)
if KIND == "finalizer":
    calls["finalize"] = telling("finalize", "Finalize", "finalize", lambda s: once("finalizer", 1) and 1 / 0)
if KIND == "initializer":
    calls["initialize"] = telling("initialize", "Initialize", "initialize", lambda s: once("initializer", 1) and 1 / 0)
if KIND == "aborter":
    calls["abort"] = Compose(telling("abort", "Abort", "abort", lambda s: 1 / 0),
                             telling("abort", "Abort", "abort", lambda s: once("late", 0) and time.sleep(3600)))
class Own(BaseException): pass
@Wrapper(**calls)
def train(call: CallWrapper):
    rank = int(os.environ["RANK"])
    meet()
    note("enter", iteration=call.iteration)
    dist.barrier()
    if KIND in ("retries", "endless") and rank == 1: raise ValueError("always")
    if KIND in ("finalizer", "aborter") and call.iteration == 0 and rank == 0: raise ValueError("boom")
    if KIND == "base" and once("base", 1): raise Own("leave")
    if KIND == "abort" and rank == 1: raise inprocess.exception.RestartAbort("it is of no use")
    if KIND == "exit" and rank == 1: sys.exit(7)
    dist.barrier()
train()
note("returned")
"""


@pytest.fixture
def ends(start):
    return lambda kind: start((HEAD + ENDS).replace("KIND", repr(kind)), "--nproc-per-node", "2").ended(120)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["unfit", "finalizer", "base"])
def test_a_rank_that_is_not_fit_leaves_and_a_spare_takes_over(ends, kind):
    """What a health check or a finalizer raises, and any other BaseException, ends the rank: NVRx's world shrinks."""
    ended = ends(kind)
    assert ended.code == 0, ended.err
    assert len(ended.of("returned")) == 2
    assert [(n["of"], n["mode"]) for n in ended.of("terminate")] == [(1, "TERMINATED")]
    assert len({n["pid"] for n in ended.of("enter") + ended.of("terminate") if n["rank"] == 1}) == 2
    assert len({n["pid"] for n in ended.of("enter") if n["rank"] == 0}) == 1


def test_what_initialize_raises_makes_another_iteration(ends):
    ended = ends("initializer")
    assert ended.code == 0, ended.err
    assert len({n["pid"] for n in ended.of("initialize")}) == 2, "every process was kept"
    assert ended.of("terminate") == []


def test_an_abort_callback_that_hangs_or_raises_is_told_and_the_groups_are_severed_all_the_same(ends):
    """W18: NVRx reads no exception of an abort, and waits for one that hangs until the hard limit."""
    ended = ends("aborter")
    assert ended.code == 0, ended.err
    assert "abort: ZeroDivisionError" in ended.err
    assert "is not done after 3 s" in ended.err
    assert {n["iteration"] for n in ended.of("enter")} == {0, 1}


def test_a_budget_ends_the_job_with_its_words(ends):
    """W19, W21: the end names the number that was reached and the one that was allowed."""
    ended = ends("retries")
    assert ended.code == 1
    assert max(n["iteration"] for n in ended.of("enter")) == 2
    assert "RetryController(max_iterations=3) allows no more" in ended.err
    assert {n["of"] for n in ended.of("terminate")} <= {0, 1}
    assert ended.of("terminate")
    assert ended.of("returned") == []


def test_an_endless_fault_ends_with_the_story_of_its_attempts(ends):
    """W21, IR-16: NVRx restarts for ever; here ten faults alike are enough, each told."""
    ended = ends("endless")
    assert ended.code == 1
    assert max(n["iteration"] for n in ended.of("enter")) == 9
    assert "10 faults in a row" in ended.err
    assert "ValueError: always" in ended.err.splitlines()[-1]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "words"), [("abort", "RestartAbort: it is of no use"), ("exit", "SystemExit: 7")])
def test_who_asks_for_the_end_gets_it(ends, kind, words):
    """IR-12, and `RestartAbort`: on one rank, for all."""
    ended = ends(kind)
    assert ended.code == 1
    assert words in ended.err
    assert {n["iteration"] for n in ended.of("enter")} == {0}
    assert [n["of"] for n in ended.of("terminate")] == [1]


MARKS = """
def loop():
    while True: pass
@Wrapper(soft_timeout=seconds(1.5), hard_timeout=seconds(40))
def train(call: CallWrapper):
    rank = int(os.environ["RANK"])
    meet()
    note("enter", iteration=call.iteration)
    call.ping()
    with call.disable_hang_protection():
        if rank == 0 and call.iteration == 0: time.sleep(5)
    dist.barrier()
    note("protected", iteration=call.iteration)
    call.ping()
    if once("loop", 1): loop()
    dist.barrier()
    if rank == 0 and once("atomic", 0):
        with call.atomic():
            note("in", iteration=call.iteration)
            time.sleep(0.2)
            open("inside", "w").close()
            time.sleep(1.0)
            note("out", iteration=call.iteration)
        note("never", iteration=call.iteration)
    elif call.iteration == 1:
        while not os.path.exists("inside"): time.sleep(0.01)
        raise ValueError("while the other is inside")
    call.store.set(f"met-{rank}", "1")
    call.store.wait([f"met-{1 - rank}"], seconds(30))
    dist.barrier()
train()
note("returned")
"""


def test_marks_and_sections(start):
    """`ping` arms the manual mark, so that a loop without progress is a hang (W1: its limit is kept); a section that
    declares itself is none; a section that is atomic is left by nobody.
    """
    ended = start(HEAD + MARKS, "--nproc-per-node", "2").ended(120)
    assert ended.code == 0, ended.err
    faults = [(f["kind"], f["injured_rank"]) for f in ended.events("FaultNoticed")]
    assert faults == [("stall", 1), ("exception", 1)]
    assert len(ended.of("in")) == len(ended.of("out")) == 1
    assert ended.of("never") == []
    assert len({n["pid"] for n in ended.of("enter")}) == 2
    stall = ended.events("FaultNoticed")[0]
    assert "limit 1.5" in stall["text"]
    assert "loop" in stall["stack"]


ROW = """
@Wrapper(initialize=inprocess.initialize.RetryController(max_iterations=COUNT + 1))
def train(call: CallWrapper):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    group = dist.new_group([0, world - 1])
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world
    if rank in (0, world - 1): dist.barrier(group)
    if rank == call.iteration % world:
        note("fault", iteration=call.iteration)
        if call.iteration < COUNT: raise ValueError(f"fault {call.iteration}")
    note("enter", iteration=call.iteration)
    dist.barrier()
    return call.iteration
note("returned", value=train())
"""


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_generations_in_a_row_meet_over_plain_init_process_group(start, count):
    """P10: torch's own agent store fails in every second of such runs; here each iteration has a prefix of its own.

    W12: NVRx waits a second at each fault; here most take less than a third of that on a busy machine.
    """
    ended = start(HEAD + ROW.replace("COUNT", str(count)), "--nproc-per-node", "4").ended(560)
    assert ended.code == 0, ended.err[-3000:]
    assert [n["value"] for n in ended.of("returned")] == [count] * 4
    assert len({n["pid"] for n in ended.of("fault")}) == 4, "every process was kept"
    at = {n["iteration"]: n["at"] for n in ended.of("fault")}
    seconds = sorted(at[i + 1] - at[i] for i in range(count))
    print(
        f"\n{count} faults in a row, 4 ranks, fault to fault: "
        f"median {seconds[count // 2]:.3f} s, worst {seconds[-1]:.3f} s"
    )
    assert seconds[count // 2] < 1.0


HELD = """
def hold_the_interpreter():
    lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    while True: libc.pthread_mutex_lock(lock)  # the second time for ever; no signal ends it, as one would a sleep
signal.signal(signal.SIGTERM, lambda *a: None)
@Wrapper(soft_timeout=seconds(1.5), hard_timeout=seconds(30))
def train(call: CallWrapper):
    import psutil, threading
    meet()
    ours = sorted(t.name for t in threading.enumerate() if "everstep" in t.name)
    note("enter", iteration=call.iteration, threads=ours, children=len(psutil.Process().children()))
    dist.barrier()
    if once("held", 0): hold_the_interpreter()
    if call.iteration == 1 and once("stopped", 1): os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
train()
note("returned")
"""


def test_a_rank_that_cannot_hear_is_replaced_and_costs_two_threads_while_it_can(start):
    """W4: NVRx kills such a rank after 90 s, 5 s more where Python handles SIGTERM, and the world shrinks. W16: NVRx
    forks a process with torch in it for each rank; here a rank has two threads of ours, and no child.
    """
    ended = start(HEAD + HELD, "--nproc-per-node", "2").ended(120)
    assert ended.code == 0, ended.err
    assert sorted(f["kind"] for f in ended.events("FaultNoticed")) == ["wedged", "wedged"]
    assert len(ended.of("returned")) == 2
    assert {tuple(n["threads"]) for n in ended.of("enter")} == {("everstep-ticker", "everstep-waiter")}
    assert {n["children"] for n in ended.of("enter")} == {0}


PLACE = """
@Wrapper()
def train(call: CallWrapper): meet()
if KIND == "group":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train()
else:
    train(); train()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "words"),
    [("twice", "have the first call the other as a plain function"), ("group", "move init_process_group into")],
)
def test_a_call_that_could_not_be_recovered_is_refused_with_the_mend(start, kind, words):
    ended = start((HEAD + PLACE).replace("KIND", repr(kind)), "--nproc-per-node", "2").ended(60)
    assert ended.code in (1, 64)
    assert words in ended.err


ELSEWHERE = """
import threading
@Wrapper(soft_timeout=seconds(2), hard_timeout=seconds(40))
def train(call: CallWrapper):
    rank, it = int(os.environ["RANK"]), call.iteration
    note("enter", iteration=it, of=rank)
    meet()
    until = time.monotonic() + 5
    while it == 0 and time.monotonic() < until:
        time.sleep(0.02)
    dist.barrier()
    if it == 0 and rank == 1: raise ValueError("boom")
    if it == 1 and rank == 0: raise ValueError("boom on rank 0")
    if it == 2 and rank == 1: time.sleep(3600)
    dist.barrier()
    note("returned", value=10 * rank)
thread = threading.Thread(target=train)
thread.start()
if os.environ["RANK"] == "0":
    thread.join()  # rank 1's script has come to its last line long before its function has
"""


def test_a_call_on_a_thread_of_the_script_s_own_is_recovered_there(start):
    """W15: NVRx interrupts the main thread whatever runs the function. Here the call's own thread is interrupted, and
    looked at: neither a main thread that waits nor a loop that hardly computes is taken for a hang. What no exception
    can end (no signal is heard there) has its process replaced.
    """
    ended = start(HEAD + ELSEWHERE, "--nproc-per-node", "2").ended(120)
    assert ended.code == 0, ended.err
    assert sorted(n["value"] for n in ended.of("returned")) == [0, 10]
    entered = {(n["iteration"], n["of"]): n["pid"] for n in ended.of("enter")}
    assert sorted(entered) == [(i, rank) for i in range(4) for rank in range(2)]
    assert len({pid for (_, rank), pid in entered.items() if rank == 0}) == 1
    assert entered[0, 1] == entered[2, 1] != entered[3, 1]
    assert [f["kind"] for f in ended.events("FaultNoticed")] == ["exception", "exception", "stall"]


NATIVE = """
import threading
@everstep.resilient
def train(run):
    note("enter", generation=run.generation, of=run.rank)
    model = torch.nn.Linear(2, 2)
    for step in run.steps(40, model=model):
        dist.barrier()
        time.sleep(0.02)
        if step == 20 and run.generation == 0 and run.rank == 1: raise ValueError("boom")
        if step == 30 and run.generation == 1 and run.rank == 0: time.sleep(3600)
    note("returned", generation=run.generation)
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


def test_the_native_call_too_and_its_hang_is_seen_by_what_the_run_has_taught(start):
    ended = start(NATIVE, "--nproc-per-node", "2").ended(120)
    assert ended.code == 0, ended.err
    assert [n["generation"] for n in ended.of("returned")] == [2, 2]
    assert [f["kind"] for f in ended.events("FaultNoticed")] == ["exception", "stall"]
