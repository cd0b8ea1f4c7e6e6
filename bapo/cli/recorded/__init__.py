"""Commands for recorded runs: report, explain, simulate, replay."""
