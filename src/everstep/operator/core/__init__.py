"""Decisions of the operator's commands: pure."""
