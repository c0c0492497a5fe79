"""What must hold in a simulated world, judged from outside: from what really happened, not from what an agent believes.

Safety: a rank is never held by two living processes; a roster leaves nobody out who lives; all agents enter the same
rosters in the same order; nothing is stopped without a fault, nor killed without a reason; a known death never stands
in a running roster; the end is declared only when all have completed.
Progress is the simulation's own affair: it raises when nobody can move.
"""

from collections.abc import Mapping, Sequence

from everstep.recovery.core import guards
from everstep.recovery.core.words import (
    Command,
    Died,
    Drain,
    End,
    Enter,
    Event,
    Fault,
    Finish,
    Incarnation,
    Kill,
    Publish,
    Report,
    Roster,
    Spawn,
    Stop,
    Wedged,
)
from everstep.recovery.core.world import Phase
from everstep.testing.world.scene import Scene
from everstep.testing.world.witness import Witness
from everstep.testing.world.worker import SimulatedWorker

MEANING: Mapping[type[Command], Phase] = {
    Enter: Phase.RUNNING,
    Report: Phase.GATHERING,
    Drain: Phase.DRAINING,
    Publish: Phase.PUBLISHING,
    Finish: Phase.FINISHING,
    End: Phase.ENDED,
}
WELL = "all members have completed"


class Violation(AssertionError):
    """A law of the protocol was broken; the message tells the seed and the last moves."""


class Laws:
    """The judge of one simulated world."""

    def __init__(self, scene: Scene, workers: Mapping[Incarnation, SimulatedWorker]) -> None:
        self.scene, self.workers = scene, workers
        self.troubled: set[int] = set()  # generations in which something really happened
        self.holders: dict[int, SimulatedWorker] = {}
        self.bad_starts = 0
        self.reasons: set[str] = set()  # why some agent, or somebody outside, has ended the job

    def require(self, condition: object, text: str) -> None:
        """Raise unless `condition` holds."""
        if not condition:
            raise Violation(f"{text}\n{self.scene.story()}")

    # What really happens.

    def hurt(self, worker: SimulatedWorker) -> None:
        """Something has befallen a worker: the newest roster, if it lists it, is in trouble."""
        newest = self._newest()
        if newest >= 0 and self.scene.board[newest].rank_of(worker.incarnation) is not None:
            self.troubled.add(newest)

    def died(self, worker: SimulatedWorker) -> None:
        """A worker has ended; well only if it had completed the newest generation."""
        if worker.status != 0 or self._newest() not in worker.completed:
            self.hurt(worker)

    def _newest(self) -> int:
        return max((g for g, roster in self.scene.board.items() if roster.members), default=-1)

    def won(self, roster: Roster) -> None:
        """A roster has won the compare-and-set."""
        board, workers = self.scene.board, self.workers
        before = board.get(roster.generation - 1)
        for old in before.members if before and roster.members else ():
            rank = roster.rank_of(old.incarnation)
            shrunk = before is not None and roster.world_size < before.world_size
            moved = shrunk and rank is not None and rank < old.rank
            self.require(moved or rank in (None, old.rank), f"rank {old.rank} was moved to {rank}")
            self.require(rank is not None or not workers[old.incarnation].alive, f"{roster} leaves out a living worker")
        if before and roster.members:
            self._sized(before, roster)
        for member in roster.members:
            worker = workers[member.incarnation]
            if not worker.well:
                self.troubled.add(roster.generation)

    def _sized(self, before: Roster, after: Roster) -> None:
        """A world keeps its size, or shrinks by those that it has lost, in order and as far as it may."""
        least = self.scene.setting.policy.min_world_size
        smallest = before.world_size if least is None else min(before.world_size, least)
        self.require(smallest <= after.world_size <= before.world_size, f"{after} has another size than it may")
        kept = [old.incarnation for old in before.members if after.rank_of(old.incarnation) is not None]
        order = [m.incarnation for m in after.members if m.incarnation in set(kept)]
        self.require(kept == order, f"{after} puts its survivors into another order")

    def takes(self, worker: SimulatedWorker, rank: int) -> None:
        """A worker is told its rank. Who held it before is dead, or has moved and is in no function."""
        moved = self.scene.setting.policy.min_world_size is not None
        self.require(moved or worker.rank in (None, rank), f"{worker} had rank {worker.rank} and is given {rank}")
        holder = self.holders.get(rank, worker)
        left = not holder.alive or (moved and (holder.rank != rank or not holder.on_stack))
        self.require(holder is worker or left, f"rank {rank} is held by {holder} and by {worker}")
        self.holders[rank] = worker

    # What agents do.

    def judge(self, agent: Witness, before: Phase, event: Event, after: Phase, commands: Sequence[Command]) -> None:
        """Look at one step of an agent, from phase to phase."""
        self._explained(agent, before, event, commands)
        leaving = self._must_leave(agent, before, event)
        agent.hear(event)
        for command in commands:
            self._ordered(agent, command)
        self.require(after is agent.stands, f"{agent} is {after.value}, but by its orders {agent.stands.value}")
        if after is Phase.GATHERING and before is not Phase.GATHERING:
            agent.opened_s, agent.failures = self.scene.now, 0
        self.require(leaving is None or agent.reports.get(leaving), f"{agent} stays with a wedged member: {event}")
        owed = list(agent.owes(after))
        self.require(not owed, f"{agent} owes {owed}")

    def _must_leave(self, agent: Witness, before: Phase, event: Event) -> int | None:
        """Return the generation that this event ends by telling of a wedged member that is not being killed yet."""
        if before not in (Phase.RUNNING, Phase.DRAINING) or not isinstance(event, Wedged):
            return None
        fresh_news = event.incarnation in agent.members.keys() - agent.deaths.keys() - agent.killed
        return agent.entered if fresh_news else None

    def _explained(self, agent: Witness, before: Phase, event: Event, commands: Sequence[Command]) -> None:
        """A death that explains somebody else's exception is reported as the better cause; the wedged are killed."""
        if isinstance(event, Died | Wedged) and before is Phase.GATHERING and agent.open_question(event):
            named = [c.fault.incarnation for c in commands if isinstance(c, Report)]
            text = f"{agent} does not say that {event.incarnation} explains the fault"
            self.require(event.incarnation in named, text)
        if isinstance(event, Wedged) and before is not Phase.ENDED and agent.must_kill(event):
            killed = [c.incarnation for c in commands if isinstance(c, Kill)]
            self.require(event.incarnation in killed, f"{agent} does not kill {event.incarnation}")

    def _ordered(self, agent: Witness, command: Command) -> None:
        self.require(agent.stands is not Phase.ENDED, f"{agent} orders {command} after the end")
        agent.stands = MEANING.get(type(command), agent.stands)
        match command:
            case Enter(roster):
                self._entered(agent, roster)
            case Stop(who, generation):
                self._stopped(agent, who, generation)
            case Kill(who):
                self._killed(agent, self.workers[who])
            case Report(fault):
                self._told(agent, fault)
            case Spawn(count):
                self.require(0 < count <= self.scene.setting.ranks, f"{agent} asks for {count} processes")
            case Publish(Roster(_, generation)) | Drain(generation) | Finish(generation):
                self._once(agent, command, generation)
            case End():
                self._ended(agent, command)

    def _once(self, agent: Witness, command: Publish | Drain | Finish, generation: int) -> None:
        key = (type(command), generation)
        self.require(key not in agent.given, f"{agent} orders {command} twice")
        agent.given.add(key)
        if isinstance(command, Finish):
            self._finished(agent, generation)
            agent.finished = True

    def _stopped(self, agent: Witness, who: Incarnation, generation: int) -> None:
        self.require(generation in self.troubled, f"{agent} stops {who} in {generation}, which is well")
        self.require(generation == agent.entered, f"{agent} stops {who} in {generation}")
        self.require(agent.reports.get(generation), f"{agent} stops {generation} and does not say why")
        if self.scene.setting.unwrapped:
            agent.killed.add(who)  # it does not live to explain anything

    def _entered(self, agent: Witness, roster: Roster) -> None:
        allowed = self.scene.setting.policy.max_restarts
        self.require(self.scene.board.get(roster.generation) == roster, f"{agent} enters what did not win")
        self.require(roster.generation == agent.entered + 1, f"{agent} skips to {roster.generation}")
        self.require(allowed is None or roster.generation <= allowed, f"{agent} restarts more than {allowed} times")
        agent.entered, agent.failures = roster.generation, 0

    def _killed(self, agent: Witness, worker: SimulatedWorker) -> None:
        late = self.scene.now >= agent.opened_s + self.scene.setting.policy.stop_deadline_s
        self.require(worker.wedged or worker.dirty or late, f"{agent} kills {worker}, which is well")
        self.require(worker.incarnation not in agent.killed, f"{agent} kills {worker} twice")
        agent.killed.add(worker.incarnation)

    def _told(self, agent: Witness, fault: Fault) -> None:
        told = agent.reports.setdefault(fault.generation, [])
        self.require(fault.generation in self.troubled, f"{agent} reports {fault}: nothing happened")
        better = [f.victim for f in told] == [True] and fault.kind in ("death", "left", "wedged")
        self.require(not told or better, f"{agent} reports {fault} after {told}")
        told.append(fault)

    def _finished(self, agent: Witness, generation: int) -> None:
        end = self.scene.board.get(generation + 1)
        self.require(end is not None and not end.members, f"{agent} finishes {generation}, which is not published")
        for member in self.scene.board[generation].members:
            done = self.workers[member.incarnation].completed
            self.require(generation in done, f"{agent} finishes {generation}: rank {member.rank} has not completed it")

    def _ended(self, agent: Witness, end: End) -> None:
        if end.reason in self.reasons:
            return  # somebody said so before
        for words, sound in self._sound(agent).items():
            if words in end.reason:
                self.require(sound and (end.code == 0) == (words == WELL), f"{agent} ends without reason: {end}")
                self.reasons.add(end.reason)
                return
        self.require(False, f"{agent} ends for no known reason: {end}")

    def _sound(self, agent: Witness) -> Mapping[str, object]:
        """Return which reasons for an end would be true now."""
        setting, board = self.scene.setting, self.scene.board
        newest = max(board, default=0)
        finished = newest > 0 and not board[newest].members
        statuses = [self.workers[m.incarnation].status for m in board[newest - 1].members] if finished else []
        ended, late = None not in statuses, setting.policy.finish_deadline_s
        return {
            WELL: finished and set(statuses) == {0} and not setting.lost_checkpoints,
            "after all had completed": (ended or self.scene.now >= late) and set(statuses) - {0, None},
            "not durable": finished and setting.lost_checkpoints,
            "waited": setting.starved or setting.mute or setting.policy.replace_deadline_s is not None,
            "before they had a rank": self.bad_starts >= guards.FALSE_STARTS,
            "restarts that": setting.policy.max_restarts == agent.entered,
            "without a new step": len(self.troubled) >= setting.policy.same_step_limit,
        }
