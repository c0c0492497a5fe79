"""A Checkpointer whose ranks stand on several hosts: network namespaces, real keepers, one shared directory."""

import importlib.util
import json
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from everstep.checkpoint import Checkpointer, catalog

_spec = importlib.util.spec_from_file_location("two_hosts", Path(__file__).with_name("two_hosts.py"))
two_hosts = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(two_hosts)

pytestmark = [pytest.mark.procs, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]
PATIENCE_S = 30.0
torch.set_num_threads(1)  # a forked child of a process with an OpenMP pool hangs in its first parallel region


@pytest.fixture
def two(request):
    """Two hosts. A network that was taken down may linger: names are new."""
    yield from two_hosts.hosts(2, f"{os.getpid() % 10_000}{chr(97 + sum(map(ord, request.node.name)) % 26)}")


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
    """A loop with a Checkpointer: saves every fifth step; after step `pause` it waits to be told to go on."""
    torch.set_num_threads(1)
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
            if step == pause:
                handle.wait(PATIENCE_S)
                notes.write(f"paused-{rank}", step=step)
                until(lambda: notes.read("go") is not None, "the word to go on")
    notes.write(f"ended-{rank}", weights=weights(model))
    dist.destroy_process_group()


def agent(host, address, body, *arguments, restarts=0):
    """torchrun's agent on one of two hosts: `--nnodes 2 --nproc-per-node 1`, workers forked from here."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    os.environ["TORCHELASTIC_ERROR_FILE"] = "/dev/null"
    config = LaunchConfig(
        min_nodes=2, max_nodes=2, nproc_per_node=1, run_id="hosts", rdzv_backend="static",
        rdzv_endpoint=f"{address}:29400", rdzv_configs={"rank": host.number, "timeout": 60}, max_restarts=restarts,
        monitor_interval=0.05, start_method="fork", local_addr=host.address,
    )  # fmt: skip
    elastic_launch(config, body)(*arguments)


def begin(two, tmp_path, name, steps, pause=0, **arguments):
    """Start the loop on both hosts; return the notes and, of each host, the agent."""
    notes = Notes(tmp_path / name)
    words = (str(tmp_path / "ckpt"), notes, steps, pause, arguments)
    return notes, [
        host.start(agent, host, two[0].address, train, *words, out=tmp_path / f"{name}-{host.number}.log")
        for host in two
    ]


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
