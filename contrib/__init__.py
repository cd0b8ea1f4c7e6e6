"""Methods and tasks apart from the core: one folder each, with its code, its settings and its presets.

    contrib/NAME/composer.py    `algorithm.composer = "NAME"`
    contrib/NAME/selector.py    `algorithm.selector = "NAME"`
    contrib/NAME/loss.py        `loss.name = "NAME"`
    contrib/NAME/task.py        `task.name = "NAME"`
    contrib/NAME/*.toml         presets, listed by `bapo config presets` after the core's

They use the same base classes as your own file does (docs/methods.md), and nothing of the core imports one.
"""
