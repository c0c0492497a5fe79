"""A snapshot without an agent: one walk's bytes in this process, restored from here or through a directory."""

import torch

from everstep.checkpoint.core.layout import Layout, Leaf
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.publish import publish
from everstep.checkpoint.shards import Target, write_shard
from everstep.checkpoint.tensors import view
from everstep.checkpoint.walk import StateWalk
from everstep.testing.disks import UnsyncedFiles


class Kept:
    """One walk's description and bytes."""

    def __init__(self, walk: StateWalk) -> None:
        """Walk, and copy every byte."""
        self.layout, parts = walk.collect()
        self.text = walk.encode(self.layout)
        self.bytes = bytearray(self.layout.payload_bytes)
        raw = torch.frombuffer(self.bytes, dtype=torch.uint8) if self.bytes else torch.empty(0, dtype=torch.uint8)
        for part in parts:
            leaves = [leaf for leaf in part.section.leaves if leaf.alias_of is None]
            for leaf, source in zip(leaves, part.sources, strict=True):
                view(raw[leaf.offset : leaf.offset + leaf.nbytes], leaf).copy_(source)

    def payload(self, leaf: Leaf) -> memoryview:
        """Return the bytes of a leaf."""
        return memoryview(self.bytes)[leaf.offset : leaf.offset + leaf.nbytes]

    def restore(self, walk: StateWalk) -> None:
        """Restore into a walk's objects, the description read back from its JSON."""
        layout = Layout.from_json(self.text)
        assert layout.to_json() == self.text
        walk.restore(layout, self.payload)
        walk.restore_generators(layout, self.payload)

    def restore_from_disk(self, walk: StateWalk, folder: str) -> None:
        """The same through a committed checkpoint of a world of one in `folder`, read by our own reader."""
        target = Target("s", 1, 0, 0, 1, f"{folder}/step-1.0.0.0123abcd-1.tmp")
        layout = Layout.from_json(self.text)
        written = write_shard(UnsyncedFiles(), target, layout, self.text, memoryview(self.bytes), {})
        publish(UnsyncedFiles(), folder, target.folder, [written], lambda _: b"")
        with open_checkpoint(f"{folder}/step-1", 0, 1) as state:
            walk.restore(state.layout, state.bytes_of)
            walk.restore_generators(state.layout, state.bytes_of)

    def leaf(self, path: str) -> Leaf:
        """Return the leaf of that path."""
        return next(leaf for leaf in self.layout.leaves() if leaf.path == path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and (self.text, self.bytes) == (other.text, other.bytes)

    __hash__ = None  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType] - its bytes may change
