"""The limits of ADR 0026, which `make lint` keeps.

    python tests/house/check.py             fails for a new offender, and for a listed one that got worse or better
    python tests/house/check.py --figures   prints the figures
    python tests/house/check.py --shrink    lowers the list to what is there now; it never adds to it

`offenders.toml` names the functions, modules, folders and phrases that were above a limit when it was made.
"""

import argparse
import ast
import functools
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
LIMITS = {
    "lines": 60,
    "parameters": 7,
    "statements": 50,
    "complexity": 20,
    "module": 450,
    "folder": 25,
    "product": 48_000,
}
RULES = {"C901": "complexity", "PLR0913": "parameters", "PLR0915": "statements"}
CODE = ("lakeupsert", "lambdas")
PAGES = ("README.md", "docs/*.md", "docs/engines/*.md", "CHANGELOG.md", "lakeupsert/cli/set_up/example.toml")

Offenders = dict[str, dict[str, int]]


def functions(root: Path) -> Iterator[tuple[str, str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each function of the product: its file, its name with its classes, and its node."""

    def inside(
        file: str, node: ast.AST, name: str
    ) -> Iterator[tuple[str, str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                full = f"{name}.{child.name}" if name else child.name
                if not isinstance(child, ast.ClassDef):
                    yield file, full, child
                yield from inside(file, child, full)
            else:
                yield from inside(file, child, name)

    for path in modules(root):
        yield from inside(path.relative_to(root).as_posix(), parsed(path), "")


def modules(root: Path) -> list[Path]:
    return sorted(path for code in CODE for path in (root / code).rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def sizes(root: Path) -> Offenders:
    """What is above its limit, by kind and place, with its figure."""
    found: Offenders = {kind: {} for kind in LIMITS}
    names: dict[tuple[str, int], str] = {}
    for file, name, node in functions(root):
        first = min((decorator.lineno for decorator in node.decorator_list), default=node.lineno)
        names |= {(file, line): name for line in range(first, node.body[0].lineno + 1)}
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > LIMITS["lines"]:
            found["lines"][f"{file}:{name}"] = lines
    folders: Counter[str] = Counter()
    for path in modules(root):
        file = path.relative_to(root).as_posix()
        lines = len(path.read_text().splitlines())
        found["product"][file.split("/")[0]] = found["product"].get(file.split("/")[0], 0) + lines
        folders[path.parent.relative_to(root).as_posix()] += path.name != "__init__.py"
        if lines > LIMITS["module"]:
            found["module"][file] = lines
    found["product"] = {code: lines for code, lines in found["product"].items() if lines > LIMITS["product"]}
    found["folder"] = {folder: count for folder, count in folders.items() if count > LIMITS["folder"]}
    for problem in ruff(root):
        kind = RULES[problem["code"]]
        file = Path(problem["filename"]).relative_to(root.resolve()).as_posix()
        figure = re.search(r"\((\d+) > \d+\)", problem["message"])
        assert figure, problem
        found[kind][f"{file}:{names[file, problem['location']['row']]}"] = int(figure[1])
    return found


def ruff(root: Path) -> list[dict]:
    """What ruff finds by the rules that count."""
    limits = {
        "mccabe.max-complexity": "complexity",
        "pylint.max-args": "parameters",
        "pylint.max-statements": "statements",
    }
    options = [f"--config=lint.{option}={LIMITS[kind]}" for option, kind in limits.items()]
    command = ["ruff", "check", "--isolated", f"--select={','.join(RULES)}", "--output-format=json", "--exit-zero"]
    program = Path(sys.executable).with_name("ruff")
    where = [str(root / code) for code in CODE if (root / code).exists()]
    return json.loads(subprocess.check_output([program, *command[1:], *options, *where], text=True))


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """What people read: each string of more than two words in a module, and each page without its code."""
    for path in modules(root):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 2:
                yield path.relative_to(root).as_posix(), node.value
    for pattern in PAGES:
        for path in sorted(root.glob(pattern)):
            text = re.sub(r"```.*?```|`[^`]*`", "`…`", path.read_text(), flags=re.DOTALL)
            yield path.relative_to(root).as_posix(), text


def phrases(root: Path) -> dict[str, list[str]]:
    """Where each phrase of phrases.toml occurs: "phrase file" to what was found."""
    patterns = {
        name: re.compile(row["pattern"], re.MULTILINE)
        for name, row in tomllib.loads((HERE / "phrases.toml").read_text()).items()
    }
    found: dict[str, list[str]] = {}
    for file, text in texts(root):
        for name, pattern in patterns.items():
            for match in pattern.finditer(text):
                around = text[max(match.start() - 30, 0) : match.end() + 30]
                found.setdefault(f"{file}:{name}", []).append(" ".join(around.split()))
    return found


def compared(listed: Offenders, found: Offenders, examples: dict[str, list[str]]) -> list[str]:
    """A line for each difference."""
    lines = []
    for kind in found:
        old, new = listed.get(kind, {}), found[kind]
        limit = f" (limit {LIMITS[kind]})" if kind in LIMITS else ""
        for place in sorted(old.keys() | new.keys()):
            before, now = old.get(place, 0), new.get(place, 0)
            if now > before:
                listing = f", listed {before}" if before else ""
                hint = "".join(f"\n    … {around} …" for around in examples.get(place, []))
                lines.append(f"{kind} {place}: {now}{limit}{listing}{hint}")
            elif now < before:
                lines.append(f"{kind} {place}: {now}, listed {before}: python tests/house/check.py --shrink")
    return lines


def shrunk(listed: Offenders, found: Offenders) -> Offenders:
    return {
        kind: {place: min(figure, found[kind][place]) for place, figure in places.items() if found[kind].get(place)}
        for kind, places in listed.items()
    }


def written(offenders: Offenders) -> str:
    head = "# What was above a limit of tests/house/check.py when this list was made. It only gets shorter.\n"
    tables = []
    for kind, places in offenders.items():
        rows = "".join(f'"{place}" = {figure}\n' for place, figure in sorted(places.items()))
        tables.append(f"\n[{kind}]\n{rows}")
    return head + "".join(tables)


def figures(root: Path, found: Offenders) -> str:
    """The table of ADR 0026, for the code as it is."""
    every = modules(root)
    folders = Counter(path.parent.relative_to(root).as_posix() for path in every if path.name != "__init__.py")
    largest = max(every, key=lambda path: len(path.read_text().splitlines()))
    lines = sum(len(path.read_text().splitlines()) for path in (root / "lakeupsert").rglob("*.py"))
    rows = {
        "lines in lakeupsert/": lines,
        f"functions above {LIMITS['lines']} lines": len(found["lines"]),
        f"functions with more than {LIMITS['parameters']} parameters": len(found["parameters"]),
        f"functions above {LIMITS['statements']} statements": len(found["statements"]),
        f"functions above complexity {LIMITS['complexity']}": len(found["complexity"]),
        f"modules above {LIMITS['module']} lines": len(found["module"]),
        "largest module": f"{len(largest.read_text().splitlines())} ({largest.relative_to(root)})",
        "largest folders": ", ".join(f"{count} ({folder})" for folder, count in folders.most_common(3)),
        "phrases to write better": sum(found["phrases"].values()),
    }
    return "\n".join(f"{name:<44} {figure}" for name, figure in rows.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help="the checkout")
    parser.add_argument("--list", type=Path, default=HERE / "offenders.toml", help="the list of offenders")
    parser.add_argument("--figures", action="store_true", help="print the figures of ADR 0026")
    parser.add_argument("--shrink", action="store_true", help="lower the list to what is there now")
    options = parser.parse_args()
    examples = phrases(options.root)
    found = sizes(options.root) | {"phrases": {place: len(around) for place, around in examples.items()}}
    if options.figures:
        print(figures(options.root, found))
        return 0
    listed: Offenders = tomllib.loads(options.list.read_text())
    if options.shrink:
        listed = shrunk(listed, found)
        options.list.write_text(written(listed))
    problems = compared(listed, found, examples)
    print(*problems, sep="\n", end="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
