"""Pure parts of the experiments: from what was written down to figures. No clock, no process, no torch."""
