"""How this process was started, read from its environment: who else there is, and where they can meet."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from everstep.errors import ConfigurationError, UsageError

Kind = Literal["torchrun", "bare", "alone"]
TORCHRUN = "TORCHELASTIC_RUN_ID"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher that is not ours made of this process."""

    kind: Kind
    rank: int
    world_size: int
    master: tuple[str, int]  # host and port that all ranks were told; port 0: nobody has to find it
    job: str  # tells this start of the job from all others that may meet at the same place

    @property
    def bind(self) -> str:
        """The address that rank 0's host listens on: loopback where all are told so, else every interface."""
        return "127.0.0.1" if self.master[0] in LOOPBACK else "0.0.0.0"


def read(env: Mapping[str, str], rank: int, world_size: int, *, launched: bool, notebook: bool) -> Launch:
    """Return how this process was started.

    Raises UsageError in a notebook that is one rank of several, and ConfigurationError where there are several ranks
    and nothing says where they meet.
    """
    if notebook and world_size > 1:
        raise UsageError(
            f"a notebook cannot be rank {rank} of {world_size}: its kernel runs cells, and nobody restarts it. Put "
            f"the function into a script and start it with `everstep run --nproc-per-node {world_size} script.py`; or "
            "unset RANK and WORLD_SIZE for a world of one."
        )
    if not launched or world_size == 1:
        return Launch("alone", 0, 1, ("127.0.0.1", 0), "alone")
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if not address or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigurationError(
            f"rank {rank} of {world_size}: MASTER_ADDR={address!r} and MASTER_PORT={port!r} do not say where the ranks "
            "meet. Export both, the same on all ranks (srun: MASTER_ADDR is the first host of the step), or start the "
            "script with `everstep run`."
        )
    run = env.get(TORCHRUN, "")
    job = f"{run}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}" if run else env.get("SLURM_JOB_ID", "bare")
    return Launch("torchrun" if run else "bare", rank, world_size, (address, int(port)), job)


def words(launch: Launch) -> str:
    """What is said once, by rank 0, when a world without our agent begins."""
    mend = "`everstep run` keeps the job through it"
    match launch.kind:
        case "torchrun":
            return (
                "started by torchrun: exceptions and hangs are survived here, but torchrun ends all ranks as soon as "
                f"one process dies (a kill, a held interpreter lock past its limit); {mend}"
            )
        case "bare":
            return (
                f"{launch.world_size} ranks without an agent: exceptions and hangs are survived here, but nobody puts "
                f"a process in the place of one that dies; {mend}"
            )
        case "alone":
            return "no launcher's variable is set: a world of one rank; `everstep run` starts more and keeps them going"
