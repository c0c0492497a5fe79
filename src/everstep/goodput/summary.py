"""The ledger as JSON: the names that users script against (DESIGN, Names that are fixed), and what stands beside them.

Beside the fixed names: `rebuild_s` and `new_step_s` of each fault, so that the seven parts add up to `recovery_s`, and
`ledger`, which tells how the figures were come by and what is wrong with them. `errors` there is empty where every
second has its place.
"""

from typing import Any

from everstep.goodput.core.accounting import Ledger
from everstep.goodput.core.recoveries import Recovery
from everstep.goodput.core.tiers import Tier

FAULT_KEYS = (
    "step", "rank", "type", "noticed_by", "detect_s", "stop_s", "regroup_s", "rebuild_s", "restore_s", "redo_s",
    "new_step_s", "recovery_s", "steps_lost", "restored_from",
)  # fmt: skip


def to_json(ledger: Ledger) -> dict[str, Any]:
    """Return the report as plain values."""
    figures = ledger.figures
    return {
        "wall_s": figures.wall_s,
        "steps": figures.steps,
        "training_goodput": figures.training_goodput,
        "infra_goodput": figures.infra_goodput,
        "checkpoint_efficiency": figures.checkpoint_efficiency,
        "ranks": [
            {"rank": r.rank, "wall_s": r.wall_s, "seconds": {c.value: s for c, s in r.seconds.items()}}
            for r in ledger.ranks
        ],
        "faults": [fault_to_json(r) for r in ledger.recoveries],
        "tiers": [tier_to_json(t) for t in ledger.tiers],
        "ledger": _how(ledger),
    }


def fault_to_json(recovery: Recovery) -> dict[str, Any]:
    """Return one fault."""
    return {key: getattr(recovery, key) for key in FAULT_KEYS}


def tier_to_json(tier: Tier) -> dict[str, Any]:
    """Return one tier. Names as in core/tiers.py; `bytes` and `seconds` are sums over what was committed."""
    return {
        "tier": tier.name,
        "taken": tier.taken,
        "coalesced": tier.coalesced,
        "committed": tier.committed,
        "failed": tier.failed,
        "bytes": tier.bytes,
        "seconds": tier.seconds,
        "achieved_interval_steps": tier.interval_steps,
        "achieved_interval_s": tier.interval_s,
        "newest_durable_step": tier.newest_step,
        "age_s": tier.age_s,
        "oldest_s": tier.oldest_s,
        "save_s": tier.save_s,
        "what": dict(tier.counts),
    }


def _how(ledger: Ledger) -> dict[str, Any]:
    figures = ledger.figures
    return {
        "closed": ledger.closed,
        "errors": list(ledger.errors),
        "notes": list(ledger.notes),
        "not_comparable": list(ledger.not_comparable),
        "step_executions": figures.executions,
        "fault_free_step_s": figures.step_s,
        "fault_free_step_source": figures.step_source,
        "clock_bound_s": ledger.story.axis.bound_s,
        "unplaced_s": {str(r.rank): r.unplaced_s for r in ledger.ranks if r.unplaced_s},
        "spares": [
            {
                "name": s.name,
                "pid": s.pid,
                "idle_s": (s.end - s.start) / 1e9,
                "took_rank": s.took[0] if s.took else None,
            }
            for s in ledger.spares
        ],
    }
