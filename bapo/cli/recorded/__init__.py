"""Commands that answer questions about recorded runs: compare, report, explain, simulate, replay."""
