"""The commands of `bapo`, one file per group. They check and prepare; the launcher process does the work."""
