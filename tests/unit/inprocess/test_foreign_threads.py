"""A thread of C++ that once ran Python (autograd's device threads) is not a leftover of the function."""

import _thread
import threading

from everstep.inprocess.frames import Leftovers


def test_a_thread_that_python_did_not_start_is_left_alone():
    leftovers = Leftovers()
    seen, over = threading.Event(), threading.Event()

    def foreign():
        threading.current_thread()  # registers as a dummy, as a hook on a device thread does
        seen.set()
        over.wait(5)

    _thread.start_new_thread(foreign, ())
    assert seen.wait(5)
    assert leftovers.threads(0.0) == ()
    over.set()
