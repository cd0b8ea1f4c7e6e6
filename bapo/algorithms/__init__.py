"""The papers: batch composers, advantages, thresholds, filters, theory. Pure functions of values."""
