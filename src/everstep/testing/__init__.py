"""Testing."""
