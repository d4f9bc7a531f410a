"""What is handed out: wheel, source and their page on an index; the image, the systemd units and the workflow of a night."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml

from lakeupsert import __version__, clock
from lakeupsert.cli import main

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOME = PROJECT["urls"]["Repository"]
SOURCES = ["pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "lakeupsert"]
DOCKERFILE = (INFRA / "container/Dockerfile").read_text()


def build(folder: Path, sources: list[str]) -> dict[str, Path]:
    """The wheel and the source archive, by their endings, of a copy of these files."""
    source = folder / "source"
    for name in sources:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            source.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source)
    for number, path in enumerate(sorted(source.rglob("*"))):
        os.utime(path, (clock.now().timestamp() - number,) * 2)  # the bytes must not come from these
    return hatch(source, folder, "sdist", "wheel")


def hatch(source: Path, folder: Path, *targets: str) -> dict[str, Path]:
    """What hatchling builds of a folder, as `make dist` does."""
    call = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    call += [word for target in targets for word in ("--target", target)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1600000000"}
    done = subprocess.run(call, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {path.suffix: path for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(tmp_path_factory.mktemp("built"), SOURCES)


@pytest.fixture
def page(built: dict[str, Path]) -> Message:
    """What an index shows."""
    with zipfile.ZipFile(built[".whl"]) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(wheel.read(name))


@pytest.mark.long
def test_page_has_the_projects_addresses_and_its_version(page: Message) -> None:
    assert page["Version"] == __version__
    addresses = dict(line.split(", ") for line in page.get_all("Project-URL", []))
    assert addresses == PROJECT["urls"]
    assert all(address.startswith(HOME) for address in addresses.values())
    assert page["Description-Content-Type"] == "text/markdown"
    assert "LICENSE" in page.get_all("License-File", [])


@pytest.mark.long
def test_links_of_the_page_lead_to_files_of_the_repository(page: Message) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.get_payload())
    assert len(links) > 30
    assert not [link for link in links if not link.startswith(("https://", "#"))]
    ours = [link.removeprefix(f"{HOME}/blob/main/").partition("#")[0] for link in links if link.startswith(HOME)]
    assert not [path for path in ours if not (ROOT / path).exists()]


@pytest.mark.long
def test_packages_have_all_files_of_lakeupsert_and_no_others(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built[".whl"]) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "lakeupsert").rglob("*") if path.is_file()}
    assert inside == {name for name in ours if "__pycache__" not in name}
    assert "lakeupsert/py.typed" in inside
    with tarfile.open(built[".gz"]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert names >= inside | {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    assert not [name for name in names if name.startswith(("tests", "docs", "build"))]


@pytest.mark.long
def test_wheel_of_the_source_archive_is_the_same(built: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(built[".gz"]) as source:
        source.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.iterdir()
    assert hatch(unpacked, tmp_path / "again", "wheel")[".whl"].read_bytes() == built[".whl"].read_bytes()


@pytest.mark.long
def test_same_files_give_the_same_bytes(built: dict[str, Path], tmp_path: Path) -> None:
    again = build(tmp_path, SOURCES)
    assert {kind: path.read_bytes() for kind, path in again.items()} == {
        kind: path.read_bytes() for kind, path in built.items()
    }


def test_site_is_of_the_same_repository() -> None:
    text = (ROOT / "site/mkdocs.yml").read_text()
    assert re.findall(r"^repo_url: (.+)$", text, re.MULTILINE) == [HOME]


def test_image_is_built_from_what_it_copies(tmp_path: Path) -> None:
    copied = re.findall(r"^COPY (.+) /build/\S*$", DOCKERFILE, re.MULTILINE)
    [lock] = re.findall(r"^ARG LOCK=(.+)$", DOCKERFILE, re.MULTILINE)
    sources = [name for line in copied for name in line.split() if name != "${LOCK}"]
    assert (ROOT / lock).is_file()
    assert build(tmp_path, sources)[".whl"]


@pytest.mark.parametrize(("target", "command"), [("run", "run"), ("worker", "worker")])
def test_image_starts_a_command_with_options_that_it_has(target: str, command: str) -> None:
    stage = DOCKERFILE.partition(f"FROM base AS {target}\n")[2].partition("\nFROM ")[0]
    [entry], [options] = (re.findall(rf"^{word} (.+)$", stage, re.MULTILINE) for word in ("ENTRYPOINT", "CMD"))
    assert json.loads(entry) == ["lakeupsert", command]
    context = main.commands[command].make_context(command, json.loads(options))
    assert context.params
    assert DOCKERFILE.rindex("\nFROM ") == DOCKERFILE.index("\nFROM base AS worker")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_units_are_those_of_systemd(tmp_path: Path) -> None:
    for unit in (INFRA / "systemd").iterdir():
        text = unit.read_text().replace("/lake/.venv/bin/lakeupsert", "/bin/true")
        (tmp_path / unit.name).write_text(text.replace("User=lakeupsert\n", ""))
    units = sorted(map(str, tmp_path.iterdir()))
    call = ["systemd-analyze", "verify", "--recursive-errors=no", *units]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    calendar = re.findall(r"^OnCalendar=(.+)$", (INFRA / "systemd/lakeupsert.timer").read_text(), re.MULTILINE)
    subprocess.run(["systemd-analyze", "calendar", *calendar], capture_output=True, check=True)


@pytest.mark.parametrize(("answers", "calls", "code"), [("0", 1, 0), ("75 0", 2, 0), ("75 75 75", 3, 75), ("1", 1, 1)])
def test_workflow_tries_again_only_if_that_may_help(answers: str, calls: int, code: int, tmp_path: Path) -> None:
    workflow = yaml.safe_load((INFRA / "github/nightly.yaml").read_text())
    steps = {step.get("name", step.get("uses")): step for step in workflow["jobs"]["night"]["steps"]}
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in steps.values() if "uses" in step)
    (tmp_path / "answers").write_text(answers.replace(" ", "\n") + "\n")
    program = 'echo "$@" >> calls; code=$(head -1 answers); sed -i 1d answers; echo {}; exit $code'
    for name, body in (("lakeupsert", program), ("sleep", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    # The shell of GitHub's runners, if a step names none.
    done = subprocess.run(["bash", "-e", "-c", steps["run"]["run"]], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == code
    called = (tmp_path / "calls").read_text().splitlines()
    assert len(called) == calls
    command, *options = called[0].split()
    main.commands[command].make_context(command, options)
    assert json.loads((tmp_path / "run.json").read_text()) == {}


def test_release_is_built_without_rights_and_signed_without_code_of_ours() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 takes `on` for true
    assert workflow["permissions"] == {"contents": "read"}
    assert "permissions" not in build
    assert publish["permissions"] == {"contents": "write", "id-token": "write", "attestations": "write"}
    commands = [step["run"].split()[0] for step in publish["steps"] if "run" in step]
    assert commands == ["cd", "gh"], "no package that pip installs runs beside a token that may write"
    [targets] = [step["run"].split()[1:] for step in build["steps"] if step.get("run", "").startswith("make ")]
    makefile = (ROOT / "Makefile").read_text()
    assert {"audit", "release"} <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    used = {step["uses"].partition("@")[0]: step.get("with", {}) for step in publish["steps"] if "uses" in step}
    assert used["actions/attest-build-provenance"] == {"subject-checksums": "dist/SHA256SUMS"}
    assert used["actions/attest-sbom"]["sbom-path"] == "dist/sbom.json"


def test_hashes_of_every_package_are_locked() -> None:
    """Of all that pip installs in a clone, in the functions' image, for the site and for the checks of infra/."""
    for name in ("requirements.lock", "lambdas/requirements.lock", "infra/requirements.txt", "site/requirements.txt"):
        packages = re.split(r"\n(?=\S)", re.sub(r"(?m)^\s*#.*\n?", "", (ROOT / name).read_text()))
        assert len(packages) > 5
        assert not [p for p in packages if p.strip() and "--hash=sha256:" not in p], name
