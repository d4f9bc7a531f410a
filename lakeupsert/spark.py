"""The command line as a Spark job: `python -m lakeupsert.spark run …`, or this file's module under `spark-submit`.

The arguments are those of `lakeupsert`. The Spark session is the submission's own; both phases run on its executors.
"""

from lakeupsert.cli import main

if __name__ == "__main__":
    main(prog_name="python -m lakeupsert.spark")
