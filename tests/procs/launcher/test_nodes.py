"""Jobs of several nodes: two agents on loopback, each with processes of its own, and what becomes of them."""

import contextlib
import os
import queue
import re
import signal
import socket
import threading
import time

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

TRAIN = """
MODE, AT = os.environ.get("MODE", ""), int(os.environ.get("AT", "5"))
@everstep.resilient
def train(run):
    own = {k: v for k, v in os.environ.items() if k.startswith(("RANK", "LOCAL_", "GROUP_", "WORLD", "ROLE_"))}
    note("enter", generation=run.generation, world=run.world_size, own=own, local=run.local_rank)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in run.steps(int(os.environ.get("STEPS", "10")), model=model, optimizer=optimizer):
        model(torch.full((2, 4), float(step))).sum().backward()
        for parameter in model.parameters(): dist.all_reduce(parameter.grad)
        if step == AT and run.generation == 0 and run.rank == int(os.environ.get("WHO", "1")):
            if MODE == "raise": raise RuntimeError("boom")
            if MODE == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if MODE == "hang": time.sleep(1000)
        optimizer.step(); optimizer.zero_grad()
        note("step", step=step, generation=run.generation)
        time.sleep(float(os.environ.get("PACE", "0")))
    note("end", weights=[float(x) for x in model.weight.flatten()])
train()
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as door:
        return door.getsockname()[1]


class Nodes:
    """Agents of one job, in one folder for each."""

    def __init__(self, start, text, count, *flags, own=None, env=None, **settings):
        self.endpoint = f"127.0.0.1:{free_port()}"
        base = ("--nnodes", str(count), "--rdzv-endpoint", self.endpoint, *flags)
        own = own or [("--node-rank", str(number)) for number in range(count)]
        self.jobs = [start(text, *base, *flags_of, env=env, **settings) for flags_of in own]

    def ended(self):
        return [job.ended() for job in self.jobs]

    def again(self, start, text, number, *flags, count, **settings):
        """A node comes (again), with this rank."""
        base = ("--nnodes", str(count), "--rdzv-endpoint", self.endpoint, *flags, "--node-rank", str(number))
        self.jobs.append(start(text, *base, **settings))
        return self.jobs[-1]


@pytest.fixture
def nodes(start):
    def begin(text, count, *flags, **settings):
        return Nodes(start, text, count, *flags, **settings)

    return begin


def of(ended, what):
    return sorted((note for one in ended for note in one.of(what)), key=lambda note: note["rank"])


def good(ended):
    for one in ended:
        assert one.code == 0, one.err[-3000:]


def entered(ended):
    """The generations that each node has written down."""
    places = [f"node-{number}" if number else "" for number in range(len(ended))]
    return [one.events("GenerationStarted", place) for one, place in zip(ended, places, strict=True)]


def weights(ended):
    return {str(note["weights"]) for note in of(ended, "end")}


def test_two_nodes_are_one_world_and_an_exception_on_either_costs_a_step_at_most(nodes):
    """Ranks node-major, torchrun's variables, all restored from one step in the memory of either node."""
    ended = nodes(TRAIN, 2, env={"MODE": "raise", "WHO": "1"}).ended()
    good(ended)
    first = [note for note in of(ended, "enter") if note["generation"] == 0]
    for rank, note in enumerate(first):
        own = note["own"]
        assert (own["RANK"], own["WORLD_SIZE"]) == (str(rank), "2")
        assert (own["LOCAL_RANK"], own["LOCAL_WORLD_SIZE"], note["local"]) == ("0", "1", 0)
        assert (own["GROUP_RANK"], own["GROUP_WORLD_SIZE"]) == (str(rank), "2")
        assert (own["ROLE_RANK"], own["ROLE_WORLD_SIZE"]) == (str(rank), "2")
    assert {note["pid"] for note in first} == {note["pid"] for note in of(ended, "enter")}  # no process was lost
    assert len(weights(ended)) == 1
    for _, second in entered(ended):
        assert (second["restore_step"], second["restored_from"]) == (4, "memory")


@pytest.mark.long
def test_a_killed_rank_is_replaced_by_a_spare_of_its_node_which_finds_its_snapshot(nodes):
    ended = nodes(TRAIN, 2, "--nproc-per-node", "2", env={"MODE": "kill", "WHO": "3"}).ended()
    good(ended)
    again = [note for note in of(ended, "enter") if note["generation"] == 1]
    before = {note["rank"]: note["pid"] for note in of(ended, "enter") if note["generation"] == 0}
    assert [note["rank"] for note in again if note["pid"] != before[note["rank"]]] == [3]
    assert [note["own"]["LOCAL_RANK"] for note in again] == ["0", "1", "0", "1"]
    assert len(weights(ended)) == 1
    for _, second in entered(ended):
        assert second["restore_step"] == 4


def test_a_lost_node_s_ranks_are_taken_by_spares_of_another(nodes):
    """The agent that is killed has started the hub and keeps the store: neither ends the job."""
    job = nodes(TRAIN, 2, env={"PACE": "0.2", "STEPS": "20"})
    job.jobs[0].wait_for("step", 3)
    job.jobs[1].wait_for("step", 3)
    os.kill(job.jobs[0].process.pid, signal.SIGKILL)
    lost, other = job.ended()
    assert lost.code == -signal.SIGKILL
    assert other.code == 0, other.err[-3000:]
    assert "node-0 (127.0.0.1) is lost" in other.err
    last = [note for note in other.of("enter") if note["generation"] == 1]
    taken = min(last, key=lambda note: note["rank"])
    assert (taken["rank"], taken["own"]["LOCAL_RANK"]) == (0, "1")
    for note in last:  # both stand on the one node that has ranks
        assert (note["own"]["GROUP_RANK"], note["own"]["GROUP_WORLD_SIZE"]) == ("0", "1")
    assert len(weights([other])) == 1
    assert sorted(note["rank"] for note in other.of("end")) == [0, 1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("own", "said"),
    [
        ([("--node-rank", "0"), ("--node-rank", "1", "--nnodes", "3")], "--nnodes 3 here, --nnodes 2 on the node"),
        ([("--node-rank", "0"), ("--node-rank", "0")], "is taken|cannot be opened: Address already in use"),
    ],
)
def test_nodes_that_do_not_fit_are_refused_with_words_and_the_others_end_too(nodes, own, said):
    ended = nodes(TRAIN, 2, "--rdzv-conf", "join_timeout=20", own=own).ended()
    assert [one.code for one in ended] == [78, 78], [one.err[-500:] for one in ended]
    assert any(re.search(said, one.err) for one in ended), [one.err[-500:] for one in ended]
    assert any("have not come to" in one.err for one in ended), [one.err[-700:] for one in ended]
    assert not any(one.run_dir.exists() for one in ended)


@pytest.mark.long
def test_a_spare_node_takes_all_ranks_of_a_lost_one(nodes):
    """Three nodes come, two work. `--nnodes 1:2`: nothing but the spare node keeps the world from shrinking."""
    flags = ("--spare-nodes", "1", "--rdzv-conf", "last_call_timeout=240", "--spares", "0", "--nproc-per-node", "2")
    own = [("--node-rank", str(number)) for number in range(3)]
    job = nodes(TRAIN, "1:2", *flags, own=own, env={"PACE": "0.2", "STEPS": "25"})
    job.jobs[1].wait_for("step", 6)
    job.jobs[1].process.kill()
    first, lost, spare = job.ended()
    good([first, spare])
    assert lost.code == -signal.SIGKILL
    assert "the job runs on node-0 at 127.0.0.1, node-1 at 127.0.0.1; spare is node-2 at 127.0.0.1" in first.err
    last = [note for note in of([first, spare], "enter") if note["generation"] == 1]
    assert [note["rank"] for note in last if note in spare.of("enter")] == [2, 3]
    for note in last:
        own = note["own"]
        assert (own["RANK"], own["WORLD_SIZE"], own["GROUP_RANK"], own["GROUP_WORLD_SIZE"]) == (
            str(note["rank"]), "4", str(note["rank"] // 2), "2",
        )  # fmt: skip
        assert (own["LOCAL_RANK"], own["LOCAL_WORLD_SIZE"]) == (str(note["rank"] % 2), "2")
    kept = {note["pid"] for note in first.of("enter")}
    assert len(kept) == 2, "the node that lives has lost no process"
    assert len(weights([first, spare])) == 1
    assert entered([first])[0][1]["restore_step"] > 0


ROLLING = """
@everstep.resilient
def train(run):
    note("enter", generation=run.generation, world=run.world_size)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in run.steps(100_000, model=model, optimizer=optimizer):
        total = torch.tensor([float(os.path.exists(os.environ["STOP"]))])
        dist.all_reduce(total)
        note("step", step=step, generation=run.generation)
        if total.item() > 0: break
        time.sleep(0.05)
    note("end", step=step)
train()
"""


@pytest.mark.long
def test_all_nodes_are_restarted_one_after_another_and_the_job_goes_on(nodes, start, tmp_path):
    """Each agent is killed, that of the hub's node too, and started again at once under its own rank.

    A node that comes back has its ranks again; the others keep their processes, and the steps go on.
    """
    env = {"STOP": str(tmp_path / "stop")}
    flags = ("--spares", "0", "--replacement-timeout", "90")
    job = nodes(ROLLING, 2, *flags, env=env)
    living = list(job.jobs)
    for each in living:
        each.wait_for("step", 3)
    for number in (1, 0, 1, 0):
        other = living[1 - number]
        before = max(note["step"] for note in other.of_now("step"))
        generation = max(note["generation"] for note in other.of_now("enter"))
        living[number].process.kill()
        living[number].process.wait()  # its streams are the hub's too, which lives on
        living[number] = job.again(start, ROLLING, number, *flags, count=2, env=env)
        living[number].wait_for("step", 3)
        entered = max(other.of_now("enter"), key=lambda note: note["generation"])
        assert (entered["generation"], entered["world"]) == (generation + 1, 2)
        assert entered["pid"] == other.of_now("enter")[0]["pid"]
        first = min(note["step"] for note in living[number].of_now("step"))
        assert first >= before - 1, "the state of the node that lived was taken up"
    (tmp_path / "stop").touch()
    good([each.ended() for each in living])


PLAIN = """
dist.init_process_group("gloo")
own = {k: v for k, v in os.environ.items() if k.startswith(("RANK", "LOCAL_", "GROUP_", "WORLD", "ROLE_"))}
note("enter", generation=int(os.environ["TORCHELASTIC_RESTART_COUNT"]), own=own)
for step in range(40):
    dist.all_reduce(torch.ones(1))
    note("step", step=step)
    time.sleep(0.1)
note("end", weights=[])
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize("text", [pytest.param(TRAIN, id="wrapped"), pytest.param(PLAIN, id="plain")])
def test_a_range_of_nodes_begins_with_who_comes_in_time_and_goes_on_with_fewer(nodes, text):
    """Two of at most three come before the last call is over; one of them is lost; one is enough."""
    own = [("--node-rank", str(number)) for number in range(2)]
    flags = ("--rdzv-conf", "last_call_timeout=6", "--nproc-per-node", "2", "--spares", "0")
    env = {"PACE": "0.2", "STEPS": "30"}
    job = nodes(text, "1:3", *flags, own=own, env=env, wrapped=text is TRAIN)
    job.jobs[0].wait_for("step", 6)
    job.jobs[1].process.kill()
    first, _ = job.ended()
    good([first])
    assert "the job runs on node-0 at 127.0.0.1, node-1 at 127.0.0.1, 2 of 3 nodes" in first.err
    worlds = {note["generation"]: note["own"]["WORLD_SIZE"] for note in first.of("enter")}
    assert worlds == {0: "4", 1: "2"}
    last = sorted((n for n in first.of("enter") if n["generation"] == 1), key=lambda note: note["rank"])
    places = [(n["own"]["LOCAL_RANK"], n["own"]["GROUP_RANK"], n["own"]["GROUP_WORLD_SIZE"]) for n in last]
    assert places == [("0", "0", "1"), ("1", "0", "1")]
    assert len(first.of("end")) == 2


class Relay:
    """A slow and lossy way to the end point: all that passes is late, and now and then nothing passes for a while.

    TCP hides a lost packet behind just that.
    """

    def __init__(self, port, late_s, stalls_s, every_s):
        self.door = socket.socket()
        self.door.bind(("127.0.0.1", 0))
        self.port = self.door.getsockname()[1]
        self._to, self._late_s, self._stalls_s, self._every_s = port, late_s, stalls_s, every_s
        self._began = time.monotonic()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:  # nobody is there until the hub is
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._to)).close()
                break
            time.sleep(0.05)
        with contextlib.suppress(OSError):
            self.door.listen()
            while True:
                line, _ = self.door.accept()
                with contextlib.suppress(OSError):
                    other = socket.create_connection(("127.0.0.1", self._to))
                    for ends in ((line, other), (other, line)):
                        threading.Thread(target=self._pass_on, args=ends, daemon=True).start()
                    continue
                line.close()

    def _pass_on(self, source, target):
        under_way = queue.SimpleQueue()
        threading.Thread(target=self._deliver, args=(under_way, target), daemon=True).start()
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                under_way.put((time.monotonic() + self._late_s, content))
        under_way.put((0.0, b""))

    def _deliver(self, under_way, target):
        with contextlib.suppress(OSError):
            while True:
                at, content = under_way.get()
                time.sleep(max(0.0, at - time.monotonic()))
                phase = (time.monotonic() - self._began) % self._every_s
                time.sleep(max(0.0, self._stalls_s - phase))
                if not content:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(content)

    def close(self):
        self.door.close()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["", "raise", "kill"])
def test_a_slow_and_lossy_link_between_agents_costs_time_and_nothing_else(nodes, start, mode):
    """0.3 s each way, and 2.5 s without a word in every 8 s: less than what makes a node suspect for good."""
    port = free_port()
    relay = Relay(port, 0.3, 2.5, 8.0)
    try:
        env = {"MODE": mode, "PACE": "0.3", "STEPS": "60", "AT": "20"}
        own = [("--node-rank", "0", "--rdzv-endpoint", f"127.0.0.1:{port}")]
        own += [("--node-rank", "1", "--rdzv-endpoint", f"127.0.0.1:{relay.port}")]
        ended = nodes(TRAIN, 2, own=own, env=env).ended()
    finally:
        relay.close()
    good(ended)
    assert {note["generation"] for note in of(ended, "enter")} == ({0, 1} if mode else {0})
    assert not any("is lost" in one.err for one in ended)
    assert len(weights(ended)) == 1
    assert sorted(note["rank"] for note in of(ended, "end")) == [0, 1]


LEMON = """
@everstep.resilient
def train(run):
    note("enter", generation=run.generation, world=run.world_size)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in run.steps(30, model=model, optimizer=optimizer):
        dist.all_reduce(torch.ones(1))
        if "job1" in os.environ["NOTES"] and step % 5 == 4 and step // 5 == run.generation: os.kill(os.getpid(), 9)
        note("step", step=step, generation=run.generation)
        time.sleep(0.05)
    note("end")
train()
"""


@pytest.mark.long
def test_a_node_whose_ranks_fault_again_and_again_is_left_out_and_not_let_in_again(nodes, start):
    """Its third fault is one too many: a spare node has its rank from then on. One that fails its check never joins."""
    flags = ("--spare-nodes", "1", "--rdzv-conf", "last_call_timeout=240", "--lemon-faults", "3")
    own = [("--node-rank", str(number)) for number in range(3)]
    job = nodes(LEMON, 2, *flags, own=own)
    job.jobs[1].process.wait(200)
    lemon = job.jobs[1].ended()
    assert lemon.code == 75, lemon.err[-2000:]
    assert "node-1 is left out: 3 faults of its ranks within 3600 s" in lemon.err
    again = start(
        LEMON, "--nnodes", "2", "--rdzv-endpoint", job.endpoint, *flags, "--node-rank", "1", again=job.jobs[1]
    )
    refused = again.ended()
    assert refused.code == 75
    assert "was left out of this job: node-1 is left out" in refused.err
    check = ("--health-check", "echo bad; exit 3", "--node-rank", "1")
    unfit = start(LEMON, "--nnodes", "2", "--rdzv-endpoint", job.endpoint, *flags, *check).ended()
    assert (unfit.code, unfit.run_dir.exists()) == (75, False)
    assert "this node does not join: --health-check 'echo bad; exit 3' ended with 3 (bad)." in unfit.err
    first, spare = job.jobs[0].ended(), job.jobs[2].ended()
    good([first, spare])
    (taken,) = spare.of("enter")
    assert taken["generation"] in (3, 4)  # 4: a spare of its node had its rank for a moment
    assert len(first.of("end")) == len(spare.of("end")) == 1
