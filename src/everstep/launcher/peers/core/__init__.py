"""What peers decide: pure."""
