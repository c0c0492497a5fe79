"""Ranks as forked children of a script, for scripts that may not import Everstep."""

import os
import sys
import traceback


def ranks(count, function):
    """Fork so many ranks; return when all have ended well."""
    children = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                function(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        children.append(pid)
    failed = [rank for rank, pid in enumerate(children) if os.waitpid(pid, 0)[1]]
    if failed:
        raise SystemExit(f"{function.__name__}: ranks {failed} failed")
