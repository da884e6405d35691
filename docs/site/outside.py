"""A hook of mkdocs: files outside of docs/ that pages link to, such as results of benchmarks, become part of the site.

Pages link to them by their place in the repository (`../benchmarks/results/x.md`), so that links work where the
repository is read, too. On the site such a file lies at its place under `repository/`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)\s#:]+)")
PLACE = "repository"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds every file that a page links to outside of docs/, and those that the added pages link to in turn."""
    waiting = list(files.documentation_pages())
    while waiting:
        page = waiting.pop()
        for _, target in LINK.findall(page.content_string):
            path = _repository_path(page.src_uri, target)
            if path is not None and files.get_file_from_path(_site_path(path)) is None:
                added = File.generated(config, _site_path(path), abs_src_path=str(ROOT / path))
                files.append(added)
                waiting += [added] if added.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lets the links of a page lead to where the files lie on the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def lead(match: re.Match[str]) -> str:
        path = _repository_path(page.file.src_uri, match[2])
        return match[0] if path is None else match[1] + posixpath.relpath(_site_path(path), folder or ".")

    return LINK.sub(lead, markdown)


def _repository_path(page: str, target: str) -> str | None:
    """Where in the repository the file lies that a page of the site links to; None if there is no such file."""
    added = page.startswith(f"{PLACE}/")
    place = page.removeprefix(f"{PLACE}/") if added else f"docs/{page}"
    path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def _site_path(path: str) -> str:
    """Where a file of the repository lies on the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{PLACE}/{path}"
