"""What an iteration barrier of NVRx costs a store: `barrier.py` holds some of its clients, a thread and a line each.

Of a fault there, as 0.4.1 does it: every rank waits for `any_rank_interrupted`; each then appends its rank to one key,
reads that whole key to count who has come, and waits for the key that the last one sets. So N ranks read N values of up
to N entries. The second of fixed waiting that 0.4.1 adds before is left out.

With `--own` NVRx's own `StoreMixin` does it, which also parses each value into a set; without, the same calls go to the
store and the entries are only counted: what the store bears, without what a few cores do for thousands of clients.
Needs torch, and NVRx with `--own`; stdin and stdout as `bench.agents`.
"""

import datetime
import importlib
import json
import resource
import sys
import threading
import time
from typing import Any

STACK = 1 << 19
SWITCH_S = 0.5  # as in `bench.agents`
AT_ONCE = threading.Semaphore(128)
"""So many connect at a time: torch looks up a name for each, and lost answers are waited for side by side."""
GROUP = "iteration_barrier"


class Client:
    """One rank."""

    def __init__(self, size: dict[str, Any], rank: int, rounds: "Rounds", *, own: bool) -> None:
        self._size, self._rank, self._rounds = size, rank, rounds
        self._limit = datetime.timedelta(seconds=size["limit"])
        self._torch: Any = importlib.import_module("torch.distributed")
        self._theirs: Any = importlib.import_module("nvidia_resiliency_ext.inprocess.store") if own else None

    def run(self) -> None:
        """Connect, and live through all rounds."""
        with AT_ONCE:
            base = self._connect()
        self._rounds.connected()
        for number in range(self._size["rounds"]):
            self._round(number, self._prefixed(number, base))

    def _connect(self) -> Any:
        kind: Any = self._torch.TCPStore
        if self._theirs is not None:
            kind = type("Client", (kind, self._theirs.StoreMixin), {})
        size = self._size
        return kind(size["host"], size["port"], None, False, wait_for_workers=False, timeout=self._limit)

    def _prefixed(self, number: int, base: Any) -> Any:
        if self._theirs is not None:
            return self._theirs.PrefixStore(number, base)
        return self._torch.PrefixStore(f"_inprocess_{number}", base)

    def _round(self, number: int, store: Any) -> None:
        began = 0.0
        if self._rank == 0:
            self._rounds.begin[number].wait(self._size["limit"])
            began = time.monotonic()
            store.set("any_rank_interrupted", "1")
        store.wait(["any_rank_interrupted"], self._limit)
        told = time.monotonic()
        if self._theirs is not None:
            store.iteration_barrier(ranks=[self._rank], rendezvous_count=self._size["ranks"], timeout=self._limit)
        else:
            self._barrier(store)
        self._rounds.done(number, told, time.monotonic(), {"set": began} if self._rank == 0 else {})

    def _barrier(self, store: Any) -> None:
        key = f"inprocess_barrier_prefix:reentrant_barrier:{GROUP}"
        store.append(f"{key}:arrived", f"{self._rank},")
        if store.get(f"{key}:arrived").count(b",") == self._size["ranks"]:
            store.set(f"{key}:last_worker_arrived", "1")
        store.wait([f"{key}:last_worker_arrived"], self._limit)


class Rounds:
    """Where the clients of this process meet after each round: the last one reports."""

    def __init__(self, clients: int, rounds: int) -> None:
        self._lock, self._clients = threading.Lock(), clients
        self._seen: dict[int, tuple[int, float, float, dict[str, float]]] = {}
        self.begin = [threading.Event() for _ in range(rounds)]
        self._here = 0

    def connected(self) -> None:
        """Count a client; say so when all are there."""
        with self._lock:
            self._here += 1
            if self._here == self._clients:
                say({"ready": self._here})

    def done(self, number: int, told: float, past: float, more: dict[str, float]) -> None:
        """Note a client's round; print the round when it was the last."""
        with self._lock:
            count, latest, last, known = self._seen.get(number, (0, 0.0, 0.0, {}))
            seen = (count + 1, max(latest, told), max(last, past), known | more)
            self._seen[number] = seen
            if seen[0] == self._clients:
                say({"round": number, "told": seen[1], "past": seen[2], **seen[3]})


def say(message: dict[str, Any]) -> None:
    """Print one line for the driver."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Hold clients, of one world after another, until stdin ends."""
    own = "--own" in sys.argv
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    threading.stack_size(STACK)
    sys.setswitchinterval(SWITCH_S)
    rounds = Rounds(0, 0)
    for line in sys.stdin:
        message = json.loads(line)
        if "go" in message:
            rounds.begin[message["go"]].set()
            continue
        size = message["size"]
        rounds = Rounds(size["last"] - size["first"], size["rounds"])
        for rank in range(size["first"], size["last"]):
            threading.Thread(target=Client(size, rank, rounds, own=own).run, daemon=True).start()


if __name__ == "__main__":
    main()
