"""What the nodes of a job decide together: pure."""
