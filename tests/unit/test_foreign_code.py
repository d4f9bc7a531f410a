"""Nothing from a store, a queue, a landing file or a client becomes code: each place that could is here, with its reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {"cloudpickle", "code", "dill", "joblib", "marshal", "multiprocessing", "pickle", "runpy", "shelve", "yaml"}
NAMES = {"ProcessPoolExecutor"}
CALLS = {"__import__", "compile", "eval", "exec"}
METHODS = {"getoutput", "import_module", "popen", "run_module", "run_path", "system"}
FLAGS = {"allow_pickle", "shell"}
SPARK = "Spark's driver and its executors send each other tasks and results, as Spark itself does"
OURS = "names that are written in this file"
KNOWN = {
    "engine/spark_gather.py pickle": SPARK,
    "engine/spark_host.py pickle": SPARK,
    "engine/spark_tasks.py cloudpickle": SPARK,
    "engine/spark_tasks.py pickle": SPARK,
    "engine/spark_window.py pickle": SPARK,
    "pipeline/child.py multiprocessing": "a child has the rights of its parent, and is no sandbox (SECURITY.md)",
    "pipeline/workers/pool.py ProcessPoolExecutor": "workers have the rights of the process that starts them",
    "pipeline/workers/pool.py multiprocessing": "the same",
    "pipeline/publishers.py import_module": "the setting `publishers` is checked against our own modules",
    "storage/__init__.py import_module": OURS,
    "cli/__init__.py import_module": OURS,
    "operations/recompute/sql.py import_module": OURS,
    "testing/contracts.py ProcessPoolExecutor": "tests of a backend",
    "testing/contracts.py multiprocessing": "tests of a backend",
    "testing/contracts.py pickle": "tests of a backend",
    "infra/spark/entry.py runpy": "lakeupsert.spark, and no other module",
    "infra/spark/entry.py run_module": "the same",
    "infra/spark/glue_entry.py runpy": "the same",
    "infra/spark/glue_entry.py run_module": "the same",
}


def risks(tree: ast.AST) -> Iterator[str]:
    """What of a module could turn bytes or text into code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
            yield from (alias.name for alias in node.names if alias.name in MODULES | NAMES)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in CALLS | METHODS:
                yield node.func.id
            elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                yield node.func.attr
            yield from (word.arg for word in node.keywords if word.arg in FLAGS)


def found_in(text: str) -> set[str]:
    return {one for one in risks(ast.parse(text)) if one in MODULES | NAMES | CALLS | METHODS | FLAGS}


def test_each_place_that_could_run_foreign_code_is_known() -> None:
    files = [path for folder in ("lakeupsert", "lambdas", "infra") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    found = {
        f"{path.relative_to(ROOT)} {one}".removeprefix("lakeupsert/")
        for path in files
        for one in found_in(path.read_text(encoding="utf-8"))
    }
    assert found == KNOWN.keys()


def test_each_way_to_run_code_is_seen() -> None:
    for text, one in {
        "import pickle": "pickle",
        "from yaml import load": "yaml",
        "import yaml.constructor": "yaml",
        "from pyspark import cloudpickle": "cloudpickle",
        "def f(x):\n    return eval(x)": "eval",
        "exec(compile(x, '', 'exec'))": "exec",
        "os.system(x)": "system",
        "subprocess.run(x, shell=True)": "shell",
        "np.load(x, allow_pickle=True)": "allow_pickle",
        "importlib.import_module(x)": "import_module",
    }.items():
        assert one in found_in(text), text
    assert not found_in("import re\nre.compile(x)\nsubprocess.run([x])\nimport json")
