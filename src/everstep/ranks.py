"""Sets of ranks: printed briefly, parsed back."""

from collections.abc import Iterable


def brief(ranks: Iterable[int]) -> str:
    """Return ranks as ranges: `[0, 1, 2, 3, 7]` → `"0-3,7"`; nothing → `"none"`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"


def parse(text: str) -> frozenset[int]:
    """Read what `brief` prints; raise ValueError with the offending part."""
    if text.strip() in ("", "none"):
        return frozenset()
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ValueError(f"{part!r} in {text!r} is not a rank or a range of ranks; write for example 0-3,7")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def visible(local_rank: int, listed: str) -> int | str:
    """Return which of the node's GPUs a rank uses, by what CUDA_VISIBLE_DEVICES lists: a number or a UUID."""
    names = [name.strip() for name in listed.split(",")]
    name = names[local_rank] if local_rank < len(names) else ""
    return int(name) if name.isdigit() else name or local_rank
