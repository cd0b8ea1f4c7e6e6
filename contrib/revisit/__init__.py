"""Revisits of prompts that were last seen some steps ago: hard ones, or any."""
