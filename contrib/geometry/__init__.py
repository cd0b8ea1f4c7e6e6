"""Task of the base model `models/geometry-tiny`: small drawings for vision-language models."""
