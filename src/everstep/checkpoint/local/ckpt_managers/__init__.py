"""`BaseCheckpointManager` and `LocalCheckpointManager`."""
