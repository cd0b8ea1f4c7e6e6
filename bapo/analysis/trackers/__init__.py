"""Sends what a run has recorded to experiment trackers. One file of this folder per tracker: it has a `make_tracker`.

A tracker is a reader of the run directory in a process of its own: what it does, or that it fails, costs a run nothing.
"""
