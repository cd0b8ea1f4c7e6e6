"""Commands for runs: runs, status, watch, logs, scale, stop, view, track, doctor."""
