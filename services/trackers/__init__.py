"""Sends what a run has recorded to experiment trackers. One file of this folder per tracker: it has a `make_tracker`.

A tracker reads the run directory in a process of its own: when it fails or waits, the run does not notice.
"""
