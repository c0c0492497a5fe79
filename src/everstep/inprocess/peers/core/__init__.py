"""What can be told of a process from its environment: pure."""
