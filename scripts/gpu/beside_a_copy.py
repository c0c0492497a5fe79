"""What a copy of a state from a GPU costs the loop beside it, by the size of its pieces and its stream's priority.

usage: python scripts/gpu/beside_a_copy.py [--gb 2]        (one GPU, under 60 s; one JSON line a case)

Two loops: `items` multiplies small matrices and reads each result (a copy to the host that queues beside ours), `step`
multiplies large ones for some 20 ms and reads one result, as training reads its loss. Each is measured alone, then with
a copy into page-locked memory begun: how much longer the loop took until the copy was done, the longest turn, and how
long the copy took.
"""

import argparse
import json
import statistics
import time

import torch


def items(small):
    """Return one turn of the loop that reads often."""
    return lambda: torch.mm(small, small).sum().item()


def steps(large):
    """Return one turn of the loop that reads once."""

    def turn():
        made = large
        for _ in range(14):
            made = torch.mm(large, made)
        made.sum().item()

    return turn


def alone(turn, seconds=0.5):
    """Return the median and the longest seconds of a turn."""
    took, begun = [], time.perf_counter()
    while time.perf_counter() - begun < seconds:
        at = time.perf_counter()
        turn()
        took.append(time.perf_counter() - at)
    return statistics.median(took), max(took)


def beside(turn, usual, copy):
    """Begin a copy, take turns until it is done; return what it cost."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    done = copy()
    issued = time.perf_counter() - begun
    turns, longest = 0, 0.0
    while not done.query():
        at = time.perf_counter()
        turn()
        longest = max(longest, time.perf_counter() - at)
        turns += 1
    total = time.perf_counter() - begun
    return {"issue_s": issued, "copy_s": total, "lost_s": total - turns * usual, "longest_s": longest, "turns": turns}


def copier(source, target, piece, kind):
    """Return what begins a copy in pieces of so many bytes, and returns the event of its end."""
    least, greatest = torch.cuda.Stream.priority_range()
    stream = torch.cuda.Stream(priority=greatest if kind == "high" else least)
    into, from_ = list(target.split(piece)), list(source.split(piece))

    def copy():
        with torch.cuda.stream(stream):
            if kind == "foreach":
                torch._foreach_copy_(into, from_, non_blocking=True)
            else:
                for to, of in zip(into, from_, strict=True):
                    to.copy_(of, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return done

    return copy


def say(**facts):
    """Write one line."""
    print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in facts.items()}), flush=True)


def main():
    """Measure all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=2.0)
    size = int(parser.parse_args().gb * 1e9)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    small = torch.rand(256, 256, device="cuda")
    large = torch.rand(8192, 8192, device="cuda", dtype=torch.bfloat16) / 64
    for name, turn in (("items", items(small)), ("step", steps(large))):
        for _ in range(20):
            turn()
        usual, longest = alone(turn)
        say(loop=name, usual_s=usual, longest_s=longest)
        for piece in (size, 128 << 20, 32 << 20, 8 << 20, 2 << 20):
            for kind in ("low", "high", "foreach"):
                copy = copier(source, target, piece, kind)
                found = [beside(turn, usual, copy) for _ in range(4)][1:]
                middle = {key: statistics.median(each[key] for each in found) for key in found[0]}
                say(loop=name, piece=piece, stream=kind, **middle)


if __name__ == "__main__":
    main()
