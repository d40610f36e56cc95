"""`python -m blockdraft`: the command line, for environments whose scripts are not on the path."""

from blockdraft.cli.main import main

if __name__ == "__main__":
    main()
