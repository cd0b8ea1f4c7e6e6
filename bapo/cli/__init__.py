"""The commands of `bapo`, one file per group. They validate and prepare; the launcher process does the work."""
