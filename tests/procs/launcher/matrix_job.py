"""The job of the matrix, behind the head that every job of these tests has: harm in named phases of a restart.

The environment's CELLS says what befalls whom. A cell has a first fault, an exception in a step, and strikes in phases
of what follows from it; each is done once, whoever holds the rank then. The phases are made to be seen by hooks in this
process: the product has none.
"""
# ruff: noqa: F821

import json

from everstep.inprocess import call, cleaning, rendezvous
from everstep.inprocess.interrupt import RankShouldRestart
from everstep.recovery import session
from everstep.recovery.core.member import Phase

CELLS = json.loads(os.environ["CELLS"])
LATE = ("completion", "a peer completed", "shutdown")  # of the end: there is no first fault before them
NOTHING = {"phase": None, "rank": None, "kind": None, "also": None}


class Injected(Exception):
    pass


def once(name):
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def harm(kind, name):
    if kind == "exception":
        raise Injected(name)  # not two alike
    if kind == "hang":
        time.sleep(1000)
    elif kind == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "SystemExit":
        sys.exit(3)
    elif kind == "SIGINT":
        os.kill(os.getpid(), signal.SIGINT)
    elif kind == "GIL":
        ctypes.PyDLL(None).sleep(1000)


def present():
    """The number and next strike of the cell whose first fault has come and whose strikes have not."""
    for number, strikes in enumerate(CELLS):
        if strikes[0]["phase"] in LATE or os.path.exists(f"first-{number}"):
            for at, strike in enumerate(strikes):
                if not os.path.exists(f"strike-{number}-{at}"):
                    return f"{number}-{at}", strike
    return None, NOTHING


def at(phase):
    name, strike = present()
    if (strike["phase"], strike["rank"]) == (phase, int(os.environ["RANK"])) and once(f"strike-{name}"):
        note("strike", name=name, generation=int(os.environ["TORCHELASTIC_RESTART_COUNT"]), **strike)
        if strike["also"]:
            with open(f"pid-{strike['also'][0]}") as file:
                os.kill(int(file.read()), getattr(signal, strike["also"][1]))
        harm(strike["kind"], name)


def before(owner, name, phase):
    real = getattr(owner, name)

    def hooked(*args, **kwargs):
        at(phase)
        return real(*args, **kwargs)

    setattr(owner, name, hooked)


def clean(self, error, real=cleaning.Cleaning.clean):
    _, strike = present()
    if strike["phase"] == "roster" and strike["rank"] != int(os.environ["RANK"]):
        time.sleep(0.2)  # the roster stays open for a moment
    at("finalize")
    dirt = real(self, error)
    at("health check")
    return dirt


def wait_for(self, *phases, real=call.Caller._wait_for):
    if self._own.phase is Phase.WAITING:
        at("roster")
    elif self._own.phase is Phase.COMPLETING:
        once(f"completed-{present()[0]}")
        at("completion")
    return real(self, *phases)


REAL = session.current()._handlers["world"]


def heard(message, fds):
    if message["kind"] == "world.assigned":
        at("assignment")
    return REAL(message, fds)


before(cleaning.Cleaning, "abort", "abort")
before(rendezvous.Meeting, "init_process_group", "initialize")
cleaning.Cleaning.clean = clean
call.Caller._wait_for = wait_for
session.current()._handlers["world"] = heard


def late(strikes):
    return strikes[0]["phase"] in LATE


def total():
    """Faults of the end come with a step of their own each, so that there is progress between them."""
    done = sum(late(strikes) and os.path.exists(f"strike-{number}-0") for number, strikes in enumerate(CELLS))
    return 4 * len(CELLS) + 4 + done


def first_fault(step, rank):
    for number, strikes in enumerate(CELLS):
        due = not late(strikes) and (4 * number + 4, (strikes[0]["rank"] + 1) % 3) == (step, rank)
        if due and once(f"first-{number}"):
            note("first", name=number)
            raise Injected(number)


def hold(run, name, strike):
    """The end waits for the fault of this cell; whoever is to have completed before it does not."""
    if strike["phase"] == "completion" and strike["rank"] != run.rank:
        with run.paused():
            while not os.path.exists(f"strike-{name}"):
                time.sleep(0.01)
            time.sleep(20 if strike["kind"] == "SIGSTOP" else 0.3)
    elif strike["phase"] == "a peer completed" and run.rank != (strike["rank"] + 1) % 3:
        with run.phase("hold", 4.0):
            while not os.path.exists(f"completed-{name}"):
                time.sleep(0.01)
            at("a peer completed")
            time.sleep(0.5)


@everstep.resilient
def train(run):
    note("enter", generation=run.generation)
    expected = present()
    with open(f"pid-{run.rank}", "w") as file:
        file.write(str(os.getpid()))
    at("first collective")
    dist.all_reduce(torch.ones(1))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        for step in run.steps(total(), model=model, optimizer=optimizer):
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            first_fault(step, run.rank)
            optimizer.step()
            optimizer.zero_grad()
            note("step", step=step, loss=loss.item().hex(), generation=run.generation)
            time.sleep(0.02)
        hold(run, *expected)
    finally:
        if isinstance(sys.exc_info()[1], RankShouldRestart):
            at("unwind")


train()
note("returned")
at("shutdown")
