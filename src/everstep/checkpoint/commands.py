"""`everstep checkpoint ls | verify | rm | convert DIR`: what lies in a checkpoint directory, for people and scripts.

`ls` exits 0; `verify` 1 where any checkpoint is damaged, with a line `step file reason` for each wound, 75 where none
is and some cannot be read now, with the same lines, 64 where there is none; `rm` removes by step, and refuses the last
whole one unless told twice; `convert` writes one for others, and refuses a damaged one, or one that cannot be read now.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from everstep.checkpoint import catalog
from everstep.checkpoint.unreachable import NOW, unreachable
from everstep.clock import SYSTEM
from everstep.errors import CheckpointError, DamagedCheckpoint, ExitCode, UsageError
from everstep.telemetry import say

GIVEN_UP_MEANWHILE = 5
_NONE = "no checkpoint in {}; give the directory that --checkpoint-dir named"

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - the type has no public name


def add_parser(subparsers: "Subparsers") -> None:
    """Add `checkpoint` and what stands under it."""
    parser = subparsers.add_parser("checkpoint", help="list, verify, remove and convert checkpoints on disk")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="ls|verify|rm|convert")
    ls = verbs.add_parser("ls", help="list the checkpoints of a directory, newest first")
    verify = verbs.add_parser("verify", help="read every byte of every checkpoint against its checksum")
    rm = verbs.add_parser("rm", help="remove checkpoints by step")
    convert = verbs.add_parser("convert", help="write one checkpoint as a file of torch.save, or as safetensors")
    for verb in (ls, verify, rm, convert):
        verb.add_argument("dir", metavar="DIR", help="what --checkpoint-dir named")
        verb.add_argument("--json", action="store_true", help="print JSON")
    verify.add_argument("--step", type=int, action="append", help="only this step (may be repeated)")
    rm.add_argument("--step", type=int, action="append", required=True, help="the step to remove (may be repeated)")
    rm.add_argument("--last-too", action="store_true", help="remove even the last whole checkpoint")
    convert.add_argument("out", metavar="OUT", help="a file (torch) or a directory (safetensors) that does not exist")
    convert.add_argument("--to", choices=("torch", "safetensors"), required=True, help="what to write")
    convert.add_argument("--step", type=int, help="which step (default: the newest)")
    convert.add_argument("--only", metavar="NAME", help="only what run.steps was given under this name (model=…)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do what was asked; return the exit code. UsageError and CheckpointError carry their own."""
    verbs = {"ls": _ls, "verify": _verify, "rm": _rm, "convert": _convert}
    return verbs[args.verb](args)


def _ls(args: argparse.Namespace) -> int:
    found = catalog.scan(args.dir)
    rows = [one.row(SYSTEM.wall()) for one in found]
    if args.json:
        _print(json.dumps(rows))
        return ExitCode.DONE
    if not rows:
        say(f"no checkpoint in {args.dir}")
        return ExitCode.DONE
    _print(f"{'step':>10}  {'complete':8}  {'tier':5}  {'size':>10}  {'world':>5}  {'age':>9}  path")
    for one, row in zip(found, rows, strict=True):
        size, world = _size(int(str(row["bytes"]))), row["world_size"] or "?"
        whole = "yes" if one.complete else "?" if one.unread else "NO"
        age = "?" if row["age_s"] is None else _age(float(str(row["age_s"])))
        _print(f"{row['step']:>10}  {whole:8}  {row['tier']:5}  {size:>10}  {world:>5}  {age:>9}  {row['path']}")
    return ExitCode.DONE


def _verify(args: argparse.Namespace) -> int:
    found = _chosen(catalog.scan(args.dir), args.step, args.dir)
    if not found:
        raise UsageError(_NONE.format(args.dir))
    wounds = [wound for one in found for wound in catalog.verify(one)]
    if wounds:  # a job that runs gives up older ones meanwhile: those had no wound
        retired = _retired(found, args.dir)
        found, wounds = [f for f in found if f.step not in retired], [w for w in wounds if w.step not in retired]
    damaged, unread = [w for w in wounds if not w.unread], [w for w in wounds if w.unread]
    if args.json:
        _print(
            json.dumps({"verified": [one.step for one in found], "damaged": _rows(damaged), "unread": _rows(unread)})
        )
    else:
        for wound in wounds:
            _print(str(wound))
        bad = len({wound.step for wound in wounds})
        away = len({wound.step for wound in unread} - {wound.step for wound in damaged})
        more = f"; {away} cannot be read now: try again when the storage answers" if away else ""
        say(f"{len(found) - bad} of {len(found)} checkpoints in {args.dir} are whole{more}")
    if damaged:
        return ExitCode.FAILED
    return ExitCode.BAD_NODE if unread else ExitCode.DONE


def _rows(wounds: Sequence[catalog.Wound]) -> list[dict[str, object]]:
    return [{"step": wound.step, "file": wound.file, "reason": wound.reason} for wound in wounds]


def _retired(found: Sequence[catalog.Found], directory: str) -> set[int]:
    """Which of those that had a manifest have none any more: their job has given them up meanwhile."""
    there = {one.step for one in catalog.scan(directory) if one.manifest is not None or one.unread}
    return {one.step for one in found if one.manifest is not None} - there


def _rm(args: argparse.Namespace) -> int:
    found = catalog.scan(args.dir)
    chosen = {one.step for one in _chosen(found, args.step, args.dir)}
    whole = {one.step for one in found if one.complete}
    if whole and whole <= chosen and not args.last_too:
        raise UsageError(
            f"that would remove every whole checkpoint in {args.dir} (step {max(whole)} is the newest); "
            "add --last-too if it is meant"
        )
    for step in sorted(chosen):
        catalog.discard(args.dir, step)
    if args.json:
        _print(json.dumps({"removed": sorted(chosen)}))
    else:
        say(f"removed from {args.dir}: step {', '.join(map(str, sorted(chosen)))}")
    return ExitCode.DONE


def _convert(args: argparse.Namespace) -> int:
    steps = None if args.step is None else [args.step]
    for _ in range(GIVEN_UP_MEANWHILE):
        found = _chosen(catalog.scan(args.dir), steps, args.dir)
        if not found:
            raise UsageError(_NONE.format(args.dir))
        try:
            return _converted(args, found)
        except CheckpointError:
            if found[0].step not in _retired(found[:1], args.dir):
                raise
    raise CheckpointError(
        f"{args.dir}: the job that writes there gave up {GIVEN_UP_MEANWHILE} checkpoints one after the other while "
        "they were read, and nothing was converted. Convert when it has ended, or have it keep more (--checkpoint-keep)"
    )


def _converted(args: argparse.Namespace, found: Sequence[catalog.Found]) -> int:
    wounds = catalog.verify(found[0])
    if catalog.only_unread(wounds):
        raise unreachable(f"{found[0].path}/{wounds[0].file}", wounds[0].reason.removeprefix(f"{NOW}: "))
    if wounds:
        older = ", ".join(str(one.step) for one in found[1:] if one.complete)
        mend = f"; choose another with --step (there are: {older})" if older else ""
        raise DamagedCheckpoint(f"{found[0].path} is damaged and not converted: {'; '.join(map(str, wounds))}{mend}")
    # By name, since it loads torch, which nothing else here needs.
    converter: Any = importlib.import_module("everstep.checkpoint.convert")
    done = converter.convert(found[0].path, args.to, args.out, args.only)
    if args.json:
        told = {"step": found[0].step, "files": list(done.files), "bytes": done.bytes, "tensors": done.tensors}
        _print(json.dumps(told | {"left_out": list(done.left_out)}))
        return ExitCode.DONE
    for text in done.left_out:
        say(f"not converted: {text}")
    say(f"step {found[0].step}: {done.tensors} tensors, {_size(done.bytes)}, to {', '.join(done.files)}")
    return ExitCode.DONE


def _chosen(found: Sequence[catalog.Found], steps: Sequence[int] | None, directory: str) -> list[catalog.Found]:
    if not steps:
        return list(found)
    missing = sorted(set(steps) - {one.step for one in found})
    if missing:
        held = ", ".join(str(one.step) for one in found) or "none"
        raise UsageError(f"{directory} has no checkpoint of step {missing[0]}; it has: {held}")
    return [one for one in found if one.step in set(steps)]


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:  # noqa: PLR2004 - the step from one unit to the next
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
