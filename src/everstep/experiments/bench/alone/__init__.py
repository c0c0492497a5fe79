"""Scripts that run in an interpreter of their own, where Everstep need not be installed."""
