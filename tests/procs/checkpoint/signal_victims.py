"""Children that get a signal in the midst of a call of their Checkpointer; for test_signals.py.

usage: signal_victims.py       reads one JSON object a line, forks a child for it, prints its exit status when it ends

Each child is an ordinary script from there on: what it leaves undone its interpreter's end does. `at` is the line of
Everstep's own code, counted in the main thread, at which the signal comes (0: none, it says how many there are);
`after_s` a time instead.
"""

import json
import os
import signal
import sys

import torch

from everstep.checkpoint import Checkpointer

OURS = os.sep + os.path.join("everstep", "")


class Struck:
    """Calls something, and sends this process a signal in the midst of it."""

    def __init__(self, number, at, after_s):
        self.number, self.at, self.after_s, self.seen = number, at, after_s, 0

    def __call__(self, call):
        if self.after_s:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), self.number))
            signal.setitimer(signal.ITIMER_REAL, self.after_s)
            return call()
        sys.settrace(self._entered)
        try:
            return call()
        finally:
            sys.settrace(None)

    def _entered(self, frame, event, arg):
        return self._line if OURS in frame.f_code.co_filename else None

    def _line(self, frame, event, arg):
        if event == "line":
            self.seen += 1
            if self.seen == self.at:
                os.kill(os.getpid(), self.number)
        return self._line


def say(**facts):
    print(json.dumps({"pid": os.getpid(), **facts}), flush=True)


def leave(*_):
    sys.exit(3)


def state_of(step):
    return {"weight": torch.full((1000,), float(step)), "rows": [torch.full((3,), step + 0.5)], "step": step}


def check(state, restored):
    assert torch.equal(state["weight"], torch.full((1000,), float(restored.step))), state
    assert torch.equal(state["rows"][0], torch.full((3,), restored.step + 0.5)), state
    assert state["step"] == restored.step, state


def run(order):
    number = getattr(signal, order["signal"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order["handler"]:
        signal.signal(signal.SIGTERM, leave)
    struck = Struck(number, order["at"], order["after_s"])
    ckpt = Checkpointer(order["directory"])
    say(keeper=ckpt._line.pid)
    state = state_of(0)
    if order["call"] == "close":
        restored = ckpt.restore(state)
        step = restored.step if restored else 0
        ckpt.save(step + 1, state_of(step + 1)).wait(60)
        ckpt.save(step + 2, state_of(step + 2))
        say(saved=step + 2)
        struck(ckpt.close)
    elif order["call"] == "again":  # as in a notebook
        try:
            struck(lambda: ckpt.restore(state))
        except KeyboardInterrupt:
            say(interrupted=True)
        state = state_of(0)
        check(state, ckpt.restore(state))
        step = state["step"] + 1
        assert ckpt.save(step, state_of(step)).wait(60).what == "committed"
        say(saved=step)
        ckpt.close()
    else:
        with ckpt:
            check(state, struck(lambda: ckpt.restore(state)))
    say(lines=struck.seen)


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(json.loads(line))
            return
        _, status = os.waitpid(child, 0)
        say(ended=os.waitstatus_to_exitcode(status))


main()
