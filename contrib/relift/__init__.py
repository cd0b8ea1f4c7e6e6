"""ReLIFT: supervised steps on what is out of reach (arXiv 2506.07527)."""
