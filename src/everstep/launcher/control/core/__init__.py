"""Decisions of the end point: no sockets, no clock."""
