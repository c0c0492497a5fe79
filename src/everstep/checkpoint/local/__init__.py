"""Checkpoints on each node's own disk under NVRx's names: managers, tensor-aware states, replication."""
