"""`python -m bapo.cli ...`: the `bapo` command."""

from bapo.cli.app import main

if __name__ == "__main__":
    main()
