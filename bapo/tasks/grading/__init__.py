"""Grade in processes that can be killed; `pool` is what callers see."""
