"""Each way to save that `everstep bench checkpoint` measures, written as its users write it.

Whatever is asynchronous and not ours waits for its save before, as its documentation does: without that the saves that
wait for the disk would fill the memory.
"""

import importlib
import os
import shutil
from typing import Any


class Way:
    """One way to save: what a user of it writes."""

    waits_for_all = False
    apart = False  # each rank has files of its own, of which no other knows

    def __init__(self, folder: str, interval: int, rank: int = 0, ranks: int = 1) -> None:
        self.folder, self.interval, self.rank, self.ranks = folder, interval, rank, ranks
        if self.apart and ranks > 1:
            self.folder = os.path.join(folder, f"rank-{rank}")
            os.mkdir(self.folder)
        self.done: set[int] = set()

    def begin(self) -> None:
        """Get ready."""

    def save(self, step: int, state: Any) -> None:
        """Save what is due."""
        raise NotImplementedError

    def pass_by(self, step: int, state: Any) -> None:
        """Come to a step that is not due."""

    def durable(self) -> set[int]:
        """Return the steps that are durable; never waits."""
        return self.done

    def wait(self) -> None:
        """Wait for what is under way."""

    def load(self, step: int, state: Any) -> None:
        """Read that step into the state."""
        import torch  # noqa: PLC0415 - a daemon of DCP imports this too

        for name, value in torch.load(self.path(step), map_location="cpu", weights_only=True).items():
            state.parts[name].copy_(value)

    def path(self, step: int) -> str:
        """Where a step goes."""
        return os.path.join(self.folder, f"step-{step}")

    def older(self, step: int) -> None:
        """Remove what is older than the newest two, as a user does."""
        if self.rank and not self.apart:
            return
        for name in os.listdir(self.folder):
            if int(name.rpartition("-")[2]) < step and int(name.rpartition("-")[2]) != max(self.done, default=-1):
                path = os.path.join(self.folder, name)
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)

    def close(self) -> None:
        """End what was started."""


class Everstep(Way):
    """`Checkpointer`, called after every step."""

    on_busy = "coalesce"

    def begin(self) -> None:
        """See `Way`."""
        module: Any = importlib.import_module("everstep.checkpoint")
        self._made = module.Checkpointer
        self._saver = self._made(self.folder, interval=self.interval, on_busy=self.on_busy)
        self._open: list[Any] = []

    def save(self, step: int, state: Any) -> None:
        """See `Way`."""
        self._open.append(self._saver.save(step, state.objects))

    def pass_by(self, step: int, state: Any) -> None:
        """See `Way`."""
        self._saver.save(step, state.objects)

    def durable(self) -> set[int]:
        """See `Way`."""
        for handle in [each for each in self._open if each.done()]:
            self._open.remove(handle)
            if handle.fate.what == "committed":
                self.done.add(handle.step)
        return self.done

    def wait(self) -> None:
        """See `Way`."""
        for handle in self._open:
            handle.wait()

    def load(self, step: int, state: Any) -> None:
        """See `Way`."""
        with self._made(self.folder) as saver:
            restored = saver.restore(state.objects, step=step)
        if restored is None or restored.step != step:
            raise RuntimeError(f"restore gave {restored}")

    def close(self) -> None:
        """See `Way`."""
        self._saver.close()


class Block(Everstep):
    """The same, waiting."""

    on_busy = "block"


class Skip(Everstep):
    """The same, leaving out."""

    on_busy = "skip"


class TorchSave(Way):
    """`torch.save` into a new file, and fsync; of several ranks each saves its part."""

    waits_for_all = True
    apart = True

    def save(self, step: int, state: Any) -> None:
        """See `Way`."""
        import torch  # noqa: PLC0415 - a daemon of DCP imports this too

        self.older(step)
        with open(self.path(step), "wb") as out:
            torch.save(state.parts, out)
            out.flush()
            os.fsync(out.fileno())
        self.done.add(step)


class DcpSave(Way):
    """`torch.distributed.checkpoint.save`, which syncs its files."""

    waits_for_all = True

    def begin(self) -> None:
        """See `Way`."""
        self._dcp: Any = importlib.import_module("torch.distributed.checkpoint")

    def save(self, step: int, state: Any) -> None:
        """See `Way`."""
        self.older(step)
        self._dcp.save(state.tensors, checkpoint_id=self.path(step))
        self.done.add(step)

    def load(self, step: int, state: Any) -> None:
        """See `Way`."""
        self._dcp.load(state.tensors, checkpoint_id=self.path(step))


class DcpThread(DcpSave):
    """`async_save`, waiting for the one before, as its tutorial does; ranks agree in a group of its own."""

    waits_for_all = False
    kind = "THREAD"

    def begin(self) -> None:
        """See `Way`."""
        super().begin()
        saver: Any = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
        self._kind = saver.AsyncCheckpointerType[self.kind]
        dist: Any = importlib.import_module("torch.distributed")
        self._group = dist.new_group(backend="gloo") if self.ranks > 1 else None
        self._under_way: tuple[int, Any] | None = None

    def save(self, step: int, state: Any) -> None:
        """See `Way`."""
        self.wait()
        self.older(step)
        made = self._dcp.async_save(
            state.tensors, checkpoint_id=self.path(step), async_checkpointer_type=self._kind, process_group=self._group
        )
        self._under_way = (step, getattr(made, "upload_completion", made))

    def durable(self) -> set[int]:
        """See `Way`."""
        if self._under_way is not None and self._under_way[1].done():
            self.wait()
        return self.done

    def wait(self) -> None:
        """See `Way`."""
        if self._under_way is not None:
            step, future = self._under_way
            future.result()
            self.done.add(step)
            self._under_way = None


class DcpProcess(DcpThread):
    """The same in a process."""

    kind = "PROCESS"


class Nvrx(Way):
    """NVRx's `TorchAsyncCheckpoint`, finalised before the next, as its documentation does; each rank saves its part."""

    apart = True

    def begin(self) -> None:
        """See `Way`."""
        module: Any = importlib.import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt")
        self._saver = module.TorchAsyncCheckpoint()
        self._step: int | None = None

    def save(self, step: int, state: Any) -> None:
        """See `Way`."""
        self.wait()
        self.older(step)
        self._saver.async_save(state.parts, self.path(step))
        self._step = step

    def durable(self) -> set[int]:
        """See `Way`."""
        self._saver.finalize_async_save(blocking=False)
        if self._step is not None and self._saver._async_calls_queue.get_num_unfinalized_calls() == 0:  # noqa: SLF001
            self.done.add(self._step)
            self._step = None
        return self.done

    def wait(self) -> None:
        """See `Way`."""
        if self._step is not None:
            self._saver.finalize_async_save(blocking=True)
            self.done.add(self._step)
            self._step = None

    def close(self) -> None:
        """See `Way`."""
        self._saver.finalize_async_save(blocking=False, terminate=True)


WAYS = {
    "everstep": Everstep, "everstep-block": Block, "everstep-skip": Skip, "torch.save": TorchSave, "dcp.save": DcpSave,
    "dcp.async_save-thread": DcpThread, "dcp.async_save-process": DcpProcess, "nvrx": Nvrx,
}  # fmt: skip
