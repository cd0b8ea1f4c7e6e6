"""MoPPS (arXiv 2507.04632): prompts by a Beta posterior."""
