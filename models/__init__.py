"""The project's own base model and how it is made: `python -m models.train_base_model --help`."""
