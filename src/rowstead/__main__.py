"""`python -m rowstead`: the command line."""

from rowstead.cli.main import command

if __name__ == "__main__":
    command()
