"""TEMPO (arXiv 2509.18314): credit where responses part."""
