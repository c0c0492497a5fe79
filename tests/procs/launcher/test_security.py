"""What docs/security.md says of other users of the machine and of strangers on the network."""

import contextlib
import os
import socket
import subprocess
import uuid

import psutil
import pytest

from everstep.checkpoint.keeper_ranks import Ranks
from everstep.checkpoint.segments import Segment
from everstep.clock import SYSTEM
from everstep.process.loop import Loop
from everstep.process.page import Page
from everstep.recovery.control_file import NAME, ControlFile
from everstep.recovery.link import Link

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]
NOBODY = 65534
TRY = """
import os, sys
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDONLY))
        print("read")
    except OSError as error:
        print(error.strerror)
"""
CONNECT = """
import socket, sys
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect("\\0" + sys.argv[1])
line.settimeout(60)
print(line.recv(10) or "hung up")
"""
by_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@by_root
def test_another_user_reads_neither_the_token_nor_the_memory_of_a_job(tmp_path):
    folder = tmp_path
    while folder != folder.parent and str(folder).count("/") > 1:  # pytest's own folders are closed to others
        folder.chmod(0o755)
        folder = folder.parent
    ControlFile("127.0.0.1", 1, "secret", "h", "node-0", 1, "j").write(tmp_path)
    (tmp_path / "open").write_text("as any file of the run folder")
    segment, page = Segment("0.0", 4096), Page.create("0")
    try:
        paths = [tmp_path / "open", tmp_path / NAME, *(f"/proc/{os.getpid()}/fd/{fd}" for fd in (segment.fd, page))]
        tried = subprocess.run(
            ["/usr/bin/env", "python3", "-c", TRY, *map(str, paths)], user=NOBODY, group=NOBODY, extra_groups=[],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    finally:
        os.close(page)
        os.close(segment.fd)
    assert tried.stdout.split("\n")[:4] == ["read", *["Permission denied"] * 3]


class Keeper:
    def __init__(self):
        self.came = 0

    def hello(self, rank, pid, line):
        self.came += 1
        return True

    def said(self, rank, message):
        pass

    went = begin = said

    def deserted(self):
        pass


@by_root
def test_another_user_of_the_machine_is_not_let_in_by_a_keeper():
    name = f"everstep-test-{uuid.uuid4().hex}"
    loop, door = Loop(SYSTEM), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(f"\0{name}")
    door.listen(5)
    first, theirs = Link.pair()
    ranks = Ranks(loop, first, door, Keeper())
    command = ["/usr/bin/env", "python3", "-c", CONNECT, name]
    try:
        with subprocess.Popen(
            command, user=NOBODY, group=NOBODY, extra_groups=[], stdout=subprocess.PIPE, text=True
        ) as stranger:
            while stranger.poll() is None:
                loop.later(0.05, lambda: None)
                loop.turn()
            assert stranger.stdout.read().strip() == "hung up"
        assert len(ranks._unnamed) == 1, "the one that has started it"
    finally:
        ranks.shut()
        theirs.close()
        for line in ranks._unnamed:
            line.close()
        loop.close()


ONE = """
@everstep.resilient
def train(run):
    weight = torch.nn.Linear(4, 4)
    for step in run.steps(100_000, model=weight):
        dist.all_reduce(torch.ones(1))
        note("step", step=step) if step == 2 else None
        time.sleep(0.01)
train()
"""


def listening(job):
    """Addresses at which any process of a job listens."""
    found = set()
    for pid in job.left():
        with contextlib.suppress(psutil.NoSuchProcess):  # one may end meanwhile
            connections = psutil.Process(pid).net_connections("inet")
            found |= {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.long
def test_a_job_of_one_node_listens_on_loopback_alone_and_leaves_nothing_in_shared_memory(start):
    job = start(ONE, "--nproc-per-node", "2", env={"GLOO_SOCKET_IFNAME": "lo"})
    job.wait_for("step", 2)
    assert listening(job) == {"127.0.0.1"}
    assert [name for name in os.listdir("/dev/shm") if "everstep" in name] == []
    job.process.terminate()
    job.ended()


@pytest.mark.long
def test_strangers_at_the_end_point_of_nodes_change_nothing(start):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    jobs = [
        start(ONE, "--nnodes", "2", "--node-rank", str(number), "--rdzv-endpoint", f"127.0.0.1:{port}")
        for number in range(2)
    ]
    for job in jobs:
        job.wait_for("step")
    said = [
        b"\x16\x03\x01" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        b"{}\n",
        b'{"kind":"fact"}\n',
        b'{"kind":"join","terms":3}\n',
        b"\0" * 9,
        b"[" * 5000 + b"\n",
        b'{"kind":"join","terms":{"version":' + b"[" * 990 + b"]" * 990 + b"}}\n",
    ]
    for words in said * 20:
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(words)
    lasting = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    steps = [len(job.notes()) for job in jobs]
    for line in lasting:
        line.close()
    assert [len(job.notes()) >= before for job, before in zip(jobs, steps, strict=True)] == [True, True]
    jobs[0].process.terminate()
    for number, job in enumerate(jobs):
        ended = job.ended()
        assert ended.events("FaultNoticed", f"node-{number}" if number else "") == []
        assert ended.code == 143
