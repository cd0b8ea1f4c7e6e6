"""The data API of the page: one file per answer. What such a file must have is in `bapo.web.asking`."""
