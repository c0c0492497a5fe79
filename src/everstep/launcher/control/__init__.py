"""The agent's end point for operators: HTTP on loopback, served by the agent's own loop."""
