"""The agent: one a node, one thread, no torch; parent of every process of the job on its node."""
