"""The project's own base models and how they are made: `python -m models.train_base_model`, `train_geometry_model`."""
