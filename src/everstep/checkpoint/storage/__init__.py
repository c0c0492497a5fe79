"""Where checkpoints lie: a directory of the machine's file system, or a prefix of an object store."""
