"""A rank's side of the disk tiers: knows the one step that is to be staged, and holds what was, until it is written.

Two threads meet here: the waiter, which hears the agent (`on_message`), and the main thread at the end of each step
(`due`, `staged`). Rule: an intent for a step that this rank has already ended is answered "late", never taken later:
the step would be another on this rank than on its peers.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from everstep.checkpoint.tier_settings import LOCAL, MAIN, PEER

DIRECTORIES = (MAIN, LOCAL)
"""Directories that an agent may write to, by the prefix of their messages."""
READERS = (*DIRECTORIES, PEER)
"""All tiers that read snapshots at their own pace: those, and copies on other nodes."""

Send = Callable[[Mapping[str, Any]], None]


class IntentClient:
    """Fed by the waiter thread; the main thread asks `due` after each step, and says `staged` of what it took."""

    def __init__(self, send: Send, step: int = 0, tier: str = MAIN) -> None:
        self.tier, self._send = tier, send
        self._lock = threading.Lock()
        self._done = step
        self._intent: tuple[str, int] | None = None
        self._taking: str | None = None
        self._problems: list[str] = []
        self._wanted = -1  # the step of the last intent

    def on_message(self, message: Mapping[str, Any]) -> None:
        """Hear the agent: any message whose kind starts with the tier's name. On the waiter thread."""
        match message["kind"].partition(".")[2]:
            case "intent":
                self._offered(message["save"], message["step"])
            case "void":
                with self._lock:
                    if self._intent is not None and self._intent[0] == message["save"]:
                        self._intent = None
            case "problem":
                with self._lock:
                    self._problems.append(message["text"])
            case _:
                return

    def _offered(self, save: str, step: int) -> None:
        with self._lock:
            present = self._done
            if step > present:
                self._intent = (save, step)
                self._wanted = step
        if step <= present:
            self._send({"kind": f"{self.tier}.late", "save": save, "step": present})

    def due(self, step: int) -> bool:
        """Say that `step` is done here; True when its snapshot is to be held for the disk. Main thread."""
        with self._lock:
            self._done = step
            self._taking = None
            if self._intent is None or step < self._intent[1]:
                return False
            save, wanted = self._intent
            self._intent = None
            if step == wanted:
                self._taking = save
                return True
        self._send({"kind": f"{self.tier}.late", "save": save, "step": step})  # the loop jumped over it
        return False

    def staged(self, buffer: int, hold: Callable[[], int]) -> None:
        """The snapshot of the step that was due is whole in `buffer`. Main thread.

        hold: makes a hold of it for this tier, and returns its number; 0 where it could not be held.
        """
        with self._lock:
            save, self._taking, step = self._taking, None, self._done
        if save is None:
            return
        number = hold()
        if number:
            self._send({"kind": f"{self.tier}.staged", "save": save, "buffer": buffer, "hold": number})
        else:
            self._send({"kind": f"{self.tier}.late", "save": save, "step": step})

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """What was measured at `step`, by which the best checkpoints are kept; told where that step is saved."""
        with self._lock:
            wanted = self._wanted == step
        if wanted and metrics:
            self._send({"kind": f"{self.tier}.measured", "step": step, "metrics": dict(metrics)})

    def damaged(self, step: int, text: str) -> None:
        """A restore could not read the checkpoint of `step`: it is struck out for the next generation's plan."""
        self._send({"kind": f"{self.tier}.damaged", "step": step, "text": text})

    def restored(self, step: int, total: int) -> None:
        """The checkpoint of `step` is where this rank goes on, in a job of `total` steps."""
        self._send({"kind": f"{self.tier}.restored", "step": step, "total": total})

    def rewound(self, step: int) -> None:
        """A generation begins after `step`; intents of the last one are void."""
        with self._lock:
            self._done, self._intent, self._taking = step, None, None

    def problems(self) -> list[str]:
        """Take what went wrong since the last call, a sentence each."""
        with self._lock:
            told, self._problems = self._problems, []
        return told


class Disks:
    """All slower tiers of a rank: one snapshot serves each that wants its step."""

    def __init__(self, send: Send) -> None:
        self._disks = {name: IntentClient(send, tier=name) for name in READERS}

    def on_message(self, message: Mapping[str, Any]) -> None:
        """See `IntentClient.on_message`."""
        self._disks[str(message["kind"]).partition(".")[0]].on_message(message)

    def due(self, step: int) -> bool:
        """See `IntentClient.due`: True where any of them wants it. Each is told of the step."""
        wanted = [disk.due(step) for disk in self._disks.values()]
        return any(wanted)

    def staged(self, buffer: int, hold: Callable[[], int]) -> None:
        """See `IntentClient.staged`: each has a hold of its own, or the first that gives it up would free it."""
        for disk in self._disks.values():
            disk.staged(buffer, hold)

    def measured(self, tier: str, step: int, metrics: Mapping[str, float]) -> None:
        """See `IntentClient.measured`."""
        self._disks[tier].measured(step, metrics)

    def damaged(self, tier: str, step: int, text: str) -> None:
        """See `IntentClient.damaged`."""
        self._disks[tier].damaged(step, text)

    def restored(self, tier: str, step: int, total: int) -> None:
        """See `IntentClient.restored`."""
        self._disks[tier].restored(step, total)

    def rewound(self, step: int) -> None:
        """See `IntentClient.rewound`."""
        for disk in self._disks.values():
            disk.rewound(step)

    def problems(self) -> list[str]:
        """See `IntentClient.problems`."""
        return [text for disk in self._disks.values() for text in disk.problems()]
