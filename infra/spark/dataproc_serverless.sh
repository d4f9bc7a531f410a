#!/usr/bin/env bash
# A night as a batch of Dataproc Serverless: BUCKET has entry.py, env.tar.gz and lakeupsert.toml below code/. There is no queue of
# Google's: `queue` of the configuration is a path on the driver, such as /tmp/lakeupsert.sqlite, since `run` sends what is left.
#   REGION=europe-west1 BUCKET=lake infra/spark/dataproc_serverless.sh run --host spark --config gs://lake/code/lakeupsert.toml --json
set -euo pipefail
exec gcloud dataproc batches submit pyspark "gs://$BUCKET/code/entry.py" \
    --region "$REGION" \
    --version 3.0 \
    --archives "gs://$BUCKET/code/env.tar.gz#environment" \
    --properties "spark.dataproc.driverEnv.PYSPARK_PYTHON=./environment/bin/python,spark.executorEnv.PYSPARK_PYTHON=./environment/bin/python,spark.executor.memoryOverhead=4g" \
    -- "$@"
