"""Which prompts a step samples: one file per selector, found by name (`algorithm.selector`)."""
