"""Commands for recorded runs: compare, report, explain, simulate, replay."""
