"""Facts in, findings out: pure."""
