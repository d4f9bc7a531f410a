"""What spark-submit starts, since a submission names a file and no module: `python -m lakeupsert.spark` with the arguments."""

import runpy

runpy.run_module("lakeupsert.spark", run_name="__main__", alter_sys=True)
