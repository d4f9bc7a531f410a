"""`python -m lakeupsert`: the command line."""

from lakeupsert.cli import main

if __name__ == "__main__":
    main(prog_name="python -m lakeupsert")
