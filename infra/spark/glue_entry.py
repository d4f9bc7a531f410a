"""The same for a job of AWS Glue, which passes named arguments only: `--command "run --host spark …"` are the command's."""

import runpy
import shlex
import sys

from awsglue.utils import getResolvedOptions

sys.argv[1:] = shlex.split(getResolvedOptions(sys.argv, ["command"])["command"])
runpy.run_module("lakeupsert.spark", run_name="__main__", alter_sys=True)
