"""Owned processes: how they are started, watched without their help, and ended."""
