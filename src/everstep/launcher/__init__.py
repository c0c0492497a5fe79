"""The launcher: an agent, its zygote, warm workers; torchrun's command line."""
