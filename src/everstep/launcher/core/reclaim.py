"""Is the memory of a device free for the next attempt? Pure.

The driver frees what a process held before its death can be reaped (measured on one H200, 1 to 100 GiB: within 0.3 ms
of it, `scripts/gpu/memory_after_death.py`), so as a rule the first look is the last. What is then still taken is

* being freed, where it falls: waited for;
* held by a living process: of this job, a rank that shares the device; else a stranger, who is named, not waited for;
* nobody's and standing still: named. A restart cannot mend it, and the script's own words on it come soon enough.
"""

from dataclasses import dataclass

MIB = 1 << 20
STILL_S = 1.0
"""Memory that has not fallen for so long is not being freed."""


@dataclass(frozen=True, slots=True)
class Look:
    """What NVML says of one device at one moment. Bytes."""

    used: int
    held: int = 0  # by living processes, as far as NVML tells it
    sharing: bool = False  # one of them is of this job
    strangers: tuple[str, ...] = ()  # the others: "pid 7 (python)"


class Reclaim:
    """Judges look after look; `tolerance` bytes in use count as free."""

    def __init__(self, device: object, limit_s: float, tolerance: int) -> None:
        self._device, self._limit_s, self._tolerance = device, limit_s, tolerance
        self._began: float | None = None
        self._least, self._fell_s = 0, 0.0

    def judge(self, look: Look, now: float) -> str | None:
        """None: look again soon. Else what is to be said before the script begins, mostly nothing."""
        if self._began is None:
            self._began, self._least, self._fell_s = now, look.used, now
        if look.used < self._least:
            self._least, self._fell_s = look.used, now
        if look.used <= self._tolerance or look.sharing:
            return ""
        waited = now - self._began
        if look.used - look.held > self._tolerance and now - self._fell_s < STILL_S and waited < self._limit_s:
            return None
        who = f"by {', '.join(look.strangers)}" if look.strangers else "by nobody that the driver names"
        return (
            f"GPU {self._device} still has {look.used // MIB} MiB taken {who}, {waited:.1f} s after the last attempt "
            "ended; the next begins all the same"
        )
