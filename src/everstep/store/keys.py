"""Where the keys of a generation stand, and which keys nobody needs any more.

Rule 1: whatever is written for a generation stands below its place, so that it can be told by its name when it is over.
Rule 2: a later generation has a roster only when all members of this one have left its function or are dead. So what is
        below an earlier place is read by nobody, and what is still written there (by a thread that an abort has left
        behind) is void: it goes with the next.
Rule 3: what is not below a place of ours belongs to somebody else.
"""

OURS = "everstep"


def place(epoch: int, generation: int) -> str:
    """Return the prefix of a generation's keys, without the last slash."""
    return f"{OURS}/{epoch}/{generation}"


def past(key: str, epoch: int, generation: int) -> bool:
    """Tell whether `key` belongs to a generation before this one."""
    ours, *numbers = key.split("/", 3)[:3]
    if ours != OURS or len(numbers) < 2 or not all(n.isascii() and n.isdigit() for n in numbers):  # noqa: PLR2004
        return False
    return (int(numbers[0]), int(numbers[1])) < (epoch, generation)
