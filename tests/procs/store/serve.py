"""Store hosts by themselves: argv is the descriptor of a line, over which hosts are ordered.

torch is imported once; for each order a child is forked (no tensor operation and no thread was run here). An order is
{"address", "port", "namespace"} with the descriptor of the host's own line; the answer is {"pid"}.
"""

import contextlib
import ctypes
import os
import sys

from everstep.recovery.link import Link, LinkClosed
from everstep.store.host import main

if __name__ == "__main__":
    orders = Link.from_fd(int(sys.argv[1]))
    while True:
        try:
            order, fds = orders.receive()
        except LinkClosed:
            break
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        pid = os.fork()
        if pid == 0:
            orders.close()
            if order["namespace"]:
                where = os.open(f"/run/netns/{order['namespace']}", os.O_RDONLY)
                assert ctypes.CDLL(None, use_errno=True).setns(where, 0) == 0
            main(Link.from_fd(fds[0]), order["address"], order["port"])
            os._exit(0)
        for fd in fds:
            os.close(fd)
        orders.send({"pid": pid})
