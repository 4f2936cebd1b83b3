"""`python -m rowstead`: the command line."""

from rowstead.cli import main

if __name__ == "__main__":
    main()
