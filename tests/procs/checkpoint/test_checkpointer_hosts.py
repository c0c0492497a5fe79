"""A Checkpointer whose ranks stand on several hosts: network namespaces, real keepers, one shared directory."""

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from everstep.checkpoint import Checkpointer, catalog, joining
from everstep.errors import CheckpointError, ConfigurationError

_spec = importlib.util.spec_from_file_location("two_hosts", Path(__file__).with_name("two_hosts.py"))
two_hosts = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(two_hosts)

pytestmark = [pytest.mark.procs, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]
PATIENCE_S = 30.0
torch.set_num_threads(1)  # a forked child of a process with an OpenMP pool hangs in its first parallel region


def mark(request):
    """A network that was taken down may linger: names are new."""
    return f"{os.getpid() % 10_000}{chr(97 + sum(map(ord, request.node.name)) % 26)}"


@pytest.fixture
def two(request):
    yield from two_hosts.hosts(2, mark(request))


@pytest.fixture
def four(request):
    yield from two_hosts.hosts(4, mark(request))


def until(true, what, hosts=()):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := true()):
        assert time.monotonic() < deadline, f"waited for {what}"
        for host in hosts:
            host.reap()
        time.sleep(0.005)
    return found


class Notes:
    """What ranks write down, a file each; and what they wait for."""

    def __init__(self, directory):
        self.directory = directory
        directory.mkdir(exist_ok=True)

    def write(self, name, **facts):
        path = self.directory / name
        path.with_suffix(".part").write_text(json.dumps(facts))
        path.with_suffix(".part").rename(path)

    def read(self, name):
        path = self.directory / name
        return json.loads(path.read_text()) if path.exists() else None


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def one_step(model, optimizer, rank, step):
    """Each rank has data of its own, dropout draws from a generator of its own, gradients are summed."""
    if step == 1:
        torch.manual_seed(1000 + rank)
    model(torch.full((4, 8), float(step + rank))).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()


def weights(model):
    return [float(x) for parameter in model.parameters() for x in parameter.detach().flatten()]


def twin(steps):
    """What the weights come to where nothing fails: both ranks, one after the other."""
    ranks = [(*build(), torch.Generator().manual_seed(1000 + rank).get_state()) for rank in range(2)]
    for step in range(1, steps + 1):
        for rank, (model, optimizer, generator) in enumerate(ranks):
            torch.set_rng_state(generator)
            model(torch.full((4, 8), float(step + rank))).square().mean().backward()
            ranks[rank] = model, optimizer, torch.get_rng_state()
        for both in zip(*(model.parameters() for model, _, _ in ranks), strict=True):
            total = both[0].grad + both[1].grad
            for parameter in both:
                parameter.grad = total.clone()
        for _, optimizer, _ in ranks:
            optimizer.step()
            optimizer.zero_grad()
    return weights(ranks[0][0])


def train(directory, notes, steps, pause, arguments):
    """A loop with a Checkpointer: saves every fifth step; after step `pause` it waits to be told to go on.

    `kill`: at that step of the first attempt rank 1 kills itself.
    """
    torch.set_num_threads(1)
    arguments = dict(arguments)
    kill = arguments.pop("kill", 0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = build()
    state = {"model": model, "optimizer": optimizer, "own": torch.zeros(2), "step": 0}
    with Checkpointer(directory, interval=5, **arguments) as ckpt:
        restored = ckpt.restore(state)
        begin = restored.step if restored else 0
        assert state["step"] == begin
        assert begin == 0 or state["own"].tolist() == [begin, rank]
        notes.write(f"began-{rank}", step=begin, tier=restored and restored.tier, host=os.uname().nodename)
        for step in range(begin + 1, steps + 1):
            one_step(model, optimizer, rank, step)
            state["own"], state["step"] = torch.tensor([float(step), rank]), step
            handle = ckpt.save(step, state)
            if step == kill and not begin:
                dist.barrier()
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            if step == pause:
                handle.wait(PATIENCE_S)
                notes.write(f"paused-{rank}", step=step)
                until(lambda: notes.read("go") is not None, "the word to go on")
    notes.write(f"ended-{rank}", weights=weights(model))
    dist.destroy_process_group()


def agent(host, number, address, environment, body, *arguments, restarts=0):
    """torchrun's agent on one of two hosts: `--nnodes 2 --nproc-per-node 1`, workers forked from here."""
    os.environ.update({"GLOO_SOCKET_IFNAME": "eth0", **environment})
    backend, configs = "static", {"rank": number}
    if restarts:  # with one store for all attempts torch's own group takes the addresses of the last for its own
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        backend, configs = "c10d", {"is_host": not number}
    os.environ["TORCHELASTIC_ERROR_FILE"] = "/dev/null"
    config = LaunchConfig(
        min_nodes=2, max_nodes=2, nproc_per_node=1, run_id="hosts", rdzv_backend=backend,
        rdzv_endpoint=f"{address}:29400", rdzv_configs={"timeout": 60, **configs}, max_restarts=restarts,
        monitor_interval=0.05, start_method="fork", local_addr=host.address,
    )  # fmt: skip
    elastic_launch(config, body)(*arguments)


def begin(hosts, tmp_path, name, steps, pause=0, environment=(), restarts=0, **arguments):
    """Start the loop on two hosts, the first of which leads; return the notes and, of each host, the agent.

    `environment`: what is set on the second.
    """
    notes = Notes(tmp_path / name)
    words = train, str(tmp_path / "ckpt"), notes, steps, pause, arguments
    agents = []
    for number, host in enumerate(hosts):
        call = functools.partial(agent, restarts=restarts)
        own = dict(environment) if number else {}
        out = tmp_path / f"{name}-{number}.log"
        agents.append(host.start(call, host, number, hosts[0].address, own, *words, out=out))
    return notes, agents


def logs(tmp_path, name):
    return "\n".join((tmp_path / f"{name}-{number}.log").read_text() for number in range(2))


def steps_of(directory):
    return sorted(one.step for one in catalog.scan(str(directory)) if one.complete)


def test_a_host_dies_in_the_midst_of_a_save_and_all_resume_at_the_last_durable_step_to_the_bit(two, tmp_path):
    """The save that needs it is void, the last durable one whole; started again, both hosts take that same step."""
    notes, agents = begin(two, tmp_path, "first", 1_000_000, pause=5)
    until(lambda: notes.read("paused-0") and notes.read("paused-1"), "the first save", two)
    assert {notes.read(f"began-{rank}")["host"] for rank in range(2)} == {host.name for host in two}
    directory = tmp_path / "ckpt"
    with two_hosts.Frozen(two[1].name, two[1].named("everstep-writer")):
        notes.write("go")
        until(lambda: list(directory.glob("step-10.*.tmp/__0_0.layout.json")), "rank 0's part of step 10", two)
        two[1].power_off()  # of its part nothing is there
    two[0].wait(agents[0])
    two[0].quiet()  # its keeper has ended
    assert steps_of(directory) == [5]
    assert not list(directory.glob("*.tmp"))
    assert f"host {two[1].name} is lost" in logs(tmp_path, "first")
    notes, agents = begin(two, tmp_path, "second", 12)
    assert [host.wait(pid) for host, pid in zip(two, agents, strict=True)] == [0, 0], logs(tmp_path, "second")
    assert [notes.read(f"began-{rank}")["step"] for rank in range(2)] == [5, 5]
    assert notes.read("ended-0")["weights"] == notes.read("ended-1")["weights"] == twin(12)
    assert steps_of(directory) == [5, 10]
    for one in catalog.scan(str(directory)):
        assert not catalog.verify(one)
    for host in two:
        host.quiet()


def ends_well(hosts, agents, tmp_path, name):
    assert [host.wait(pid) for host, pid in zip(hosts, agents, strict=True)] == [0, 0], logs(tmp_path, name)
    for host in hosts:
        host.quiet()


# Hosts by name alone: ranks of one machine that say that they stand elsewhere. They need no leave of the kernel.


def ranks_of_two_hosts(tmp_path, body):
    """Run a rank on each of two hosts; both end well."""
    pids = []
    store = str(tmp_path / f"store-{time.monotonic_ns()}")
    for rank in range(2):
        pid = os.fork()
        if not pid:
            _rank(rank, store, body)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]


def _rank(rank, store, body):
    code = 1
    try:
        torch.set_num_threads(1)
        joining._host = lambda: f"node{rank} boot"
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        body(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def keepers(ckpt):
    """The process of each host's keeper."""
    found = [None, None]
    dist.all_gather_object(found, ckpt._line.pid)
    return found


def lose_the_leading_keeper(ckpt, rank, state):
    leading, other = keepers(ckpt)
    assert leading != other
    if rank == 1:
        os.kill(leading, signal.SIGSTOP)
        handles = [ckpt.save(step, state) for step in (2, 3, 4, 5, 6)]  # none of them waits
        assert [handle.fate for handle in handles] == [None] * len(handles)
        os.kill(leading, signal.SIGKILL)
        with pytest.raises(CheckpointError, match="the keeper of host node0, which decides what is saved, is lost"):
            handles[-1].wait(PATIENCE_S)
        with pytest.raises(CheckpointError, match="is lost"):
            ckpt.restore(state)
    else:
        until(lambda: ckpt._line.lost, "the news of its end")
        with pytest.raises(CheckpointError, match="is gone"):
            ckpt.save(2, state)


def lose_the_other_keeper(ckpt, rank, state):
    _, other = keepers(ckpt)
    if rank == 0:
        os.kill(other, signal.SIGKILL)
        with pytest.raises(CheckpointError, match=r"step 7 was not saved: .*host node1.* is lost: it has ended"):
            ckpt.save(7, state).wait(PATIENCE_S)
    else:
        until(lambda: ckpt._line.lost, "the news of its end")
        with pytest.raises(CheckpointError, match=f"process {other}. is gone"):
            ckpt.save(7, state)


def test_a_keeper_that_stands_still_holds_up_no_save_and_one_that_is_killed_is_named_on_every_host(tmp_path):
    """What was committed is whole, and serves the Checkpointers that are made anew."""

    def body(rank):
        state = {"n": rank, "t": torch.full((3,), float(rank))}
        ckpt = Checkpointer(tmp_path / "ckpt")
        assert ckpt.save(1, state).wait(PATIENCE_S).what == "committed"
        for lose in (lose_the_leading_keeper, lose_the_other_keeper):
            lose(ckpt, rank, state)
            ckpt.close()
            dist.barrier()
            ckpt = Checkpointer(tmp_path / "ckpt")
            assert ckpt.restore(state).step == 1
        ckpt.close()

    ranks_of_two_hosts(tmp_path, body)
    assert steps_of(tmp_path / "ckpt") == [1]


# Long: other ends, other beginnings.


@pytest.mark.long
def test_torchrun_begins_all_workers_anew_and_they_lose_a_step_at_most(two, tmp_path):
    """One worker is killed on one host: the keepers of both write what all had in memory, and the new ones wait."""
    notes, agents = begin(two, tmp_path, "run", 15, restarts=1, kill=13, tiers={"memory": 1, "disk": 5})
    ends_well(two, agents, tmp_path, "run")
    again = {notes.read(f"began-{rank}")["step"] for rank in range(2)}
    assert again in ({12}, {13})
    assert [notes.read(f"ended-{rank}")["weights"] for rank in range(2)] == [twin(15)] * 2
    assert max(steps_of(tmp_path / "ckpt")) == 15


@pytest.mark.long
@pytest.mark.parametrize("later", ["the other leads", "others", "one alone"])
def test_the_leading_host_dies_and_whoever_comes_next_goes_on_from_the_last_durable_step(four, tmp_path, later):
    two = four[:2]
    notes, _ = begin(two, tmp_path, "first", 1_000_000, pause=5)
    until(lambda: notes.read("paused-0") and notes.read("paused-1"), "the first save", two)
    two[0].power_off()
    until(lambda: "is lost" in logs(tmp_path, "first") or not two[1].named("everstep-keeper"), "its end", two)
    two[1].power_off()
    if later == "one alone":
        with Checkpointer(tmp_path / "ckpt") as ckpt:
            state = {"model": build()[0], "optimizer": None, "own": torch.zeros(2), "step": 0}
            restored = ckpt.restore(state, strict=False)
            assert (restored.step, state["step"]) == (5, 5)
        return
    hosts = two[::-1] if later == "the other leads" else four[2:]
    notes, agents = begin(hosts, tmp_path, "second", 12)
    ends_well(hosts, agents, tmp_path, "second")
    assert [notes.read(f"began-{rank}")["step"] for rank in range(2)] == [5, 5]
    assert [notes.read(f"ended-{rank}")["weights"] for rank in range(2)] == [twin(12)] * 2


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_host_whose_network_fails_is_lost_after_a_time_and_its_successors_wait_for_that(four, tmp_path):
    """Nothing is reset: silence alone tells. The keeper of the first host ends then, and others have the directory."""
    two, others = four[:2], four[2:]
    notes, agents = begin(two, tmp_path, "first", 1_000_000, pause=5)
    until(lambda: notes.read("paused-0") and notes.read("paused-1"), "the first save", two)
    two_hosts.ip("link", "set", f"v{two[1].name}", "down")
    keeper = two[0].named("everstep")
    for pid in two[0].pids():
        if pid not in keeper:
            os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    notes, agents = begin(others, tmp_path, "second", 12)
    ends_well(others, agents, tmp_path, "second")
    assert time.monotonic() - begun > 20
    assert [notes.read(f"began-{rank}")["step"] for rank in range(2)] == [5, 5]
    assert "waiting for a Checkpointer of process" in logs(tmp_path, "second")
    assert "it has said nothing for 30 s" in logs(tmp_path, "first")
    until(lambda: not two[1].named("everstep"), "the other keeper's end", two)


@pytest.mark.long
@pytest.mark.parametrize("ahead", ["+1h", "-1h"])
def test_clocks_of_hosts_that_differ_by_an_hour_change_nothing(two, tmp_path, ahead):
    found = list(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not found:
        pytest.skip("needs libfaketime")
    clock = {"LD_PRELOAD": str(found[0]), "FAKETIME": ahead}
    notes, agents = begin(two, tmp_path, "first", 12, environment=clock, on_busy="block")
    ends_well(two, agents, tmp_path, "first")
    assert steps_of(tmp_path / "ckpt") == [5, 10]
    notes, agents = begin(two[::-1], tmp_path, "second", 16, environment=clock)  # now the other one is ahead
    ends_well(two, agents[::-1], tmp_path, "second")
    assert [notes.read(f"began-{rank}")["step"] for rank in range(2)] == [10, 10]
    assert [notes.read(f"ended-{rank}")["weights"] for rank in range(2)] == [twin(16)] * 2
    assert steps_of(tmp_path / "ckpt") == [10, 15]


@pytest.mark.long
def test_a_directory_that_is_another_one_on_one_host_is_refused_on_every_rank(tmp_path):
    """Half of each checkpoint would lie on a disk of its own."""

    def body(rank):
        (tmp_path / "ckpt").mkdir(exist_ok=True)
        dist.barrier()
        if rank == 1:
            two_hosts.cover(tmp_path / "ckpt")
        with pytest.raises(ConfigurationError, match=r"on node1 \(rank 1\) .*is another directory here. Give"):
            Checkpointer(tmp_path / "ckpt")

    ranks_of_two_hosts(tmp_path, body)


@pytest.mark.long
def test_the_example_under_torchrun_on_two_hosts(two, tmp_path, root):
    def run(steps):
        base = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--master-port", "29401"]
        pids = []
        for host in two:
            where = ["--node-rank", str(host.number), "--master-addr", two[0].address, "--local-addr", host.address]
            words = [
                sys.executable,
                *base,
                *where,
                str(root / "examples/checkpoint_only.py"),
                "--steps",
                str(steps),
                "--interval",
                "10",
            ]
            out = tmp_path / f"run-{host.number}.log"
            call = functools.partial(exec_in, tmp_path, words)
            pids.append(host.start(call, out=out))
        ends_well(two, pids, tmp_path, "run")

    run(30)
    run(40)
    assert "restored step" in logs(tmp_path, "run")


def exec_in(directory, words):
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    raise SystemExit(subprocess.run(words, cwd=directory, check=False).returncode)
