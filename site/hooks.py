"""What mkdocs has to know of this repository: README is the first page, and links may lead out of `docs/`."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
NAMED_BLOCK = re.compile(r"(?m)^```(\w+) (.+)$")
GENERATED = {"index.md": "README.md", "adr/index.md": "docs/adr/index.md"}
"""Pages without a file in `docs/`, and where their links begin."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    decisions = sorted((ROOT / "docs/adr").glob("0*.md"))
    titles = ((page.name, page.read_text().partition("\n")[0].removeprefix("# ")) for page in decisions)
    listed = "# Decisions\n\n" + "".join(f"- [{title}]({name})\n" for name, title in titles)
    for name, text in {"index.md": (ROOT / "README.md").read_text(), "adr/index.md": listed}.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links lead to pages of the site, or to the repository if the site has no such page; show the names of blocks."""
    source = GENERATED.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def target(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        shown = next((uri for uri, file in GENERATED.items() if file == path), path.removeprefix("docs/"))
        shown = posixpath.join(shown, "index.md") if f"{shown}/index.md" in GENERATED else shown
        if not (ROOT / path).exists() or files.get_file_from_path(shown) is not None:
            return posixpath.relpath(shown, posixpath.dirname(page.file.src_uri) or ".")
        return f"{config.repo_url}/blob/main/{path}"

    return NAMED_BLOCK.sub(r'```\1 title="\2"', LINK.sub(target, markdown))
