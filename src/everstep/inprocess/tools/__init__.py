"""Tools around in-process restart."""
