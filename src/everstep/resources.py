"""What must be aborted or closed around a restart: the registry that features share."""
