"""How responses are credited: one class per file, found by name (`loss.advantage`)."""
