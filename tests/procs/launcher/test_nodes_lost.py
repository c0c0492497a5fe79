"""What becomes of a job whose nodes, or whose hub, are lost in every way that a network and a kernel know (long)."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from everstep.goodput.core.accounting import account
from everstep.goodput.log import read_run

pytestmark = [pytest.mark.procs, pytest.mark.long, pytest.mark.timeout(400)]

TRAIN = """
MODE, STEPS = os.environ.get("MODE", ""), int(os.environ.get("STEPS", "150"))
@everstep.resilient
def train(run):
    note("enter", generation=run.generation, world=run.world_size)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in run.steps(STEPS, **({} if MODE == "bare" else {"model": model, "optimizer": optimizer})):
        model(torch.full((2, 4), 0.1)).sum().backward()
        for parameter in model.parameters(): dist.all_reduce(parameter.grad)
        if MODE == "hang" and step == 30 and run.generation == 0 and run.rank == 1: time.sleep(1000)
        optimizer.step(); optimizer.zero_grad()
        note("step", step=step, generation=run.generation)
        time.sleep(0.05)
    note("end")
train()
"""
PLAIN = """
dist.init_process_group("gloo")
rank, again = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
note("start", again=again, store=os.environ["MASTER_PORT"])
for step in range(5):
    dist.all_reduce(torch.ones(1))
    if step == 2 and rank == 1 and again == 0: os.kill(os.getpid(), signal.SIGKILL)
note("end")
dist.destroy_process_group()
"""


@pytest.fixture
def two(start):
    """Two agents on loopback."""

    def begin(text=TRAIN, *flags, env=None, **settings):
        with socket.create_server(("127.0.0.1", 0)) as door:
            port = door.getsockname()[1]
        base = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", *flags)
        return [start(text, *base, "--node-rank", str(n), env=env, **settings) for n in range(2)]

    return begin


def run_on(jobs):
    for job in jobs:
        job.wait_for("step", 5, limit_s=240)


def apart(lost, goes_on, steps=0):
    """Nothing of the lost node was done after the others had begun without it, but for so many steps."""
    began = min(n["at"] for n in goes_on.of("enter") if n["generation"] == 1)
    assert len([n for n in lost.of("step") if n["at"] > began]) <= steps


def goes_on_alone(ended):
    assert ended.code == 0, ended.err[-3000:]
    assert sorted(n["rank"] for n in ended.of("end")) == [0, 1]
    assert "is lost" in ended.err


def test_a_frozen_agent_is_given_up_and_ends_itself_when_it_runs_again(two):
    jobs = two(env={"STEPS": "400"})
    run_on(jobs)
    jobs[1].process.send_signal(signal.SIGSTOP)
    jobs[0].wait_for("end", 2)
    jobs[1].process.send_signal(signal.SIGCONT)
    other, lost = jobs[0].ended(), jobs[1].ended()
    goes_on_alone(other)
    assert lost.code == 75, lost.err[-3000:]
    assert "is cut off from the other nodes" in lost.err
    apart(lost, other, steps=1)  # its worker runs on to the next collective: nobody is there to stop it


def test_an_agent_that_did_not_run_for_a_while_goes_on_with_the_others(two):
    jobs = two()
    run_on(jobs)
    jobs[1].process.send_signal(signal.SIGSTOP)
    time.sleep(7.0)  # longer than its lease, not so long that it is given up
    jobs[1].process.send_signal(signal.SIGCONT)
    for ended in [job.ended() for job in jobs]:
        assert ended.code == 0, ended.err[-3000:]
        assert {n["generation"] for n in ended.of("enter")} == {0}


def test_without_their_hub_all_end_with_words(two):
    jobs = two()
    run_on(jobs)
    (hub,) = [p for p in psutil.process_iter(["cmdline"]) if "everstep.launcher.nodes.hub" in str(p.info["cmdline"])]
    hub.kill()
    for ended in [job.ended() for job in jobs]:
        assert ended.code == 75
        assert "is cut off from the other nodes: the connection to the hub has ended" in ended.err


def test_the_world_shrinks_where_no_spare_is_left(two):
    flags = ("--spares", "0", "--min-world-size", "1", "--replacement-timeout", "1")
    jobs = two(TRAIN, *flags, env={"MODE": "bare"})  # state that is kept of two ranks would not go on with one
    run_on(jobs)
    jobs[1].process.kill()
    ended, _ = [job.ended() for job in jobs]
    assert ended.code == 0, ended.err[-3000:]
    assert [n["world"] for n in ended.of("enter")] == [2, 1]


def test_no_spare_is_left_and_the_world_may_not_shrink(two):
    jobs = two(TRAIN, "--spares", "0")
    run_on(jobs)
    jobs[1].process.kill()
    ended, _ = [job.ended() for job in jobs]
    assert ended.code == 75
    assert "node-1 (127.0.0.1) is lost" in ended.err


@pytest.mark.parametrize("which", [0, 1])
def test_a_signal_to_one_agent_ends_all_with_one_step_that_is_durable(two, tmp_path, which):
    flags = ("--checkpoint-dir", str(tmp_path / "ckpt"), "--checkpoint-interval", "100000")
    jobs = two(TRAIN, *flags, env={"STEPS": "100000"})
    run_on(jobs)
    jobs[which].process.send_signal(signal.SIGTERM)
    ended = [job.ended(60) for job in jobs]
    assert [one.code for one in ended] == [143, 143], ended[0].err + ended[1].err
    (last,) = {max(note["step"] for note in one.of("step")) for one in ended}
    for one in ended:
        assert f"after step {last}. The checkpoint of step {last} is durable" in one.err
    again = [job.ended() for job in two(TRAIN, *flags, env={"STEPS": str(last + 3)})]
    for one in again:
        assert one.code == 0, one.err
        assert [note["step"] for note in one.of("step")] == [last + 1, last + 2, last + 3]


def test_a_step_that_does_not_end_on_one_node_costs_that_step_and_the_one_before_is_durable(two, tmp_path):
    flags = ("--checkpoint-dir", str(tmp_path / "ckpt"), "--checkpoint-interval", "100000", "--grace", "8")
    jobs = two(TRAIN, *flags, "--soft-timeout", "100", env={"STEPS": "100000", "MODE": "hang"})
    jobs[0].wait_for("step", 30, limit_s=240)
    jobs[0].process.send_signal(signal.SIGTERM)
    ended = [job.ended(60) for job in jobs]
    for one in ended:
        assert one.code == 143, one.err
        assert "The checkpoint of step 29 is durable" in one.err
    assert any("a step did not end within 4 s" in one.err for one in ended), "said by whoever sees it first"


def test_a_hang_is_judged_over_all_nodes_and_its_culprit_named(two):
    ended = [job.ended() for job in two(env={"MODE": "hang"})]
    for one, place in zip(ended, ("", "node-1"), strict=True):
        assert one.code == 0, one.err[-3000:]
        (fault,) = one.events("FaultNoticed", place)
        assert (fault["kind"], fault["injured_rank"]) == ("stall", 1)
    assert {n["pid"] for one in ended for n in one.of("enter")} == {n["pid"] for one in ended for n in one.of("end")}


def test_all_workers_of_an_unwrapped_script_begin_anew_on_a_new_store(two):
    ended = [job.ended() for job in two(PLAIN, wrapped=False)]
    for one in ended:
        assert one.code == 0, one.err[-3000:]
        assert [n["again"] for n in one.of("start")] == [0, 1]
    assert len({n["store"] for one in ended for n in one.of("start")}) == 2


# -- nodes with networks of their own ------------------------------------------------------------------------------


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespaces(request):
    """Nodes with addresses of their own, on a bridge: two, and one to take a place.

    A network that was taken down may linger: names are new.
    """
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    mark = f"{os.getpid() % 10_000}{chr(97 + len(request.node.name) % 26)}"
    names = [f"ev{mark}{number}" for number in range(3)]
    bridge = f"evb{mark}"
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"v{name}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.77.1.{10 + number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            files = Path("/etc/netns") / name
            files.mkdir(parents=True, exist_ok=True)
            (files / "resolv.conf").write_text("")
            (files / "nsswitch.conf").write_text("hosts: files\n")
            hosts = "".join(f"10.77.1.{10 + n} {other}\n" for n, other in enumerate(names))
            (files / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "link", "del", f"v{name}"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


@pytest.fixture
def far(start, namespaces):
    """Two agents, each in a network of its own, that meet at a name."""

    def begin(*flags):
        base = ("--nnodes", "2", "--rdzv-endpoint", f"{namespaces[0]}:29500", "--rdzv-backend", "c10d", *flags)
        env = {"GLOO_SOCKET_IFNAME": "eth0"}
        return [start(TRAIN, *base, env=env, prefix=("ip", "netns", "exec", name)) for name in namespaces[:2]]

    return begin


def test_a_node_whose_power_fails_says_nothing_and_is_given_up(far, namespaces):
    """The link goes down, and nothing is reset: the lease alone tells. The lost node ends its workers before that."""
    jobs = far()
    run_on(jobs)
    ip("link", "set", f"v{namespaces[1]}", "down")
    other, lost = jobs[0].ended(), jobs[1].ended()
    goes_on_alone(other)
    assert "its agent was silent for 10 s" in other.err
    (fault,) = account(read_run(other.run_dir).records).recoveries
    assert fault.detect_s > 8, "the ranks that were left waited all that time"
    assert lost.code == 75, lost.err[-3000:]
    assert "nobody has heard this node for 6 s" in lost.err
    apart(lost, other)


def test_a_replacement_with_another_address_has_the_name_and_the_ranks_of_a_node_without_power(start, namespaces):
    """It comes before the dead node is given up, waits in line for that, and goes on from the copy that was kept."""
    base = ("--nnodes", "2", "--rdzv-endpoint", f"{namespaces[0]}:29500", "--replacement-timeout", "100")

    def begin(name, number):
        flags = (*base, "--spares", "0", "--node-rank", str(number))
        return start(TRAIN, *flags, env={"GLOO_SOCKET_IFNAME": "eth0"}, prefix=("ip", "netns", "exec", name))

    jobs = [begin(name, number) for number, name in enumerate(namespaces[:2])]
    run_on(jobs)
    ip("link", "set", f"v{namespaces[1]}", "down")
    new = begin(namespaces[2], 1)
    other, lost, came = jobs[0].ended(), jobs[1].ended(), new.ended()
    for one in (other, came):
        assert one.code == 0, one.err[-3000:]
        assert [n["rank"] for n in one.of("end")] == [0 if one is other else 1]
    assert lost.code == 75, lost.err[-3000:]
    assert "node-1 (10.77.1.11) is lost: its agent was silent for 10 s" in other.err
    assert re.search(r"node-1 \(.*from 10\.77\.1\.12\) has come", other.err)
    assert {n["pid"] for n in other.of("enter")} == {n["pid"] for n in other.of("end")}, "it kept its process"
    (_, again) = other.events("GenerationStarted")
    assert again["restore_step"] > 0, "the copy that the other kept"
    apart(lost, other)


def test_a_node_whose_own_name_is_127_0_1_1_at_home_is_found_by_the_others(far, namespaces):
    """LA-15: as Debian's installer writes `/etc/hosts`; the other node knows the address."""
    hosts = Path("/etc/netns") / namespaces[0] / "hosts"
    hosts.write_text(hosts.read_text().replace(f"10.77.1.10 {namespaces[0]}", f"127.0.1.1 {namespaces[0]}"))
    for ended in [job.ended() for job in far()]:
        assert ended.code == 0, ended.err[-3000:]
        assert {n["world"] for n in ended.of("enter")} == {2}
        assert {f"10.77.1.{n}" for n in (10, 11)} <= {*re.findall(r"node-\d at ([\d.]+)", ended.err)}


def test_a_short_break_of_the_network_costs_nothing(far, namespaces):
    jobs = far()
    run_on(jobs)
    ip("link", "set", f"v{namespaces[1]}", "down")
    time.sleep(2.0)
    ip("link", "set", f"v{namespaces[1]}", "up")
    for ended in [job.ended() for job in jobs]:
        assert ended.code == 0, ended.err[-3000:]
        assert {n["generation"] for n in ended.of("enter")} == {0}
