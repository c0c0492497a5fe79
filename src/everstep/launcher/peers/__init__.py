"""A small agent for each worker that no agent of ours has started: plain torchrun, srun, a script by itself."""
