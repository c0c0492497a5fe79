"""`everstep doctor`: what of this machine would stop or slow a job, found before the job.

Facts are gathered by `machine`, `zygote_trial` and, in children with an end each, `child`; `core` judges them.
"""
