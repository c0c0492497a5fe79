"""Commands that look at a running job, and those that change one: `everstep ps` and its like.

Read-only but for those that say so; each asks one agent, which answers for all nodes. Nothing here loads torch.
"""
