"""Pages of the site beyond docs/: README.md and others, and one for each file that is linked to.

mkdocs calls these functions (mkdocs.yml). The pages stay as they are for readers of the repository;
their links are rewritten on the way.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Pages outside of docs/, and what they are called in the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "proto/README.md": "proto.md",
    "proto/weights.md": "proto-weights.md",
}
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".json": "json",
    ".ipynb": "json",
    ".yaml": "yaml",
    ".jsonl": "json",
}
# Code, which is left alone, or the target of a link.
_LINK = re.compile(r"^```.*?^```|`[^`\n]+`|(?<=\]\()(?P<target>[^)\s]+)(?=\))", re.M | re.S)
_FOREIGN = re.compile(r"#|[a-z]+:")
# What GitHub shows as a list or a table, and mkdocs as lines of a paragraph.
_CODE = re.compile(r"<(pre|code)\b.*?</\1>|<!--.*?-->", re.S)
_PARAGRAPH = re.compile(r"<(p|li)>((?:(?!</?(?:p|li|ul|ol)\b).)*)", re.S)
_KEY = re.compile(r"<code>([^<\s]{1,40}|[^<]{1,24})</code>")
_LOST = re.compile(r"^ *(?:[-*|]|1\.) .*$", re.M)

log = logging.getLogger("mkdocs.hooks.make_site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/, and pages of linked files."""
    for path, name in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    for page in list(files.documentation_pages()):
        text = page.content_string
        for match in _LINK.finditer(text):
            path = _repository_path(page.src_uri, match["target"])
            if path and _is_source(path) and (name := _site_name(path)) not in files.src_uris:
                shown = InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, name, content=_source(path), inclusion=shown))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page from places in the repository to places in the site."""

    def rewritten(match: re.Match[str]) -> str:
        path = _repository_path(page.file.src_uri, match["target"])
        if path is None:
            return match[0]
        anchor = match["target"].partition("#")[2]
        target = posixpath.relpath(_site_name(path), posixpath.dirname(page.file.src_uri))
        return f"{target}#{anchor}" if anchor else target

    return _LINK.sub(rewritten, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep keys in one piece; warn of lists and tables that lack an empty line above."""
    for match in _PARAGRAPH.finditer(_CODE.sub("", html)):
        _, _, rest = match[2].partition("\n")
        for lost in _LOST.findall(rest):
            log.warning(
                "%s: needs an empty line above, or more indent: %r", page.file.src_uri, lost
            )
    return _KEY.sub(r'<code class="key">\1</code>', html)


def _repository_path(page: str, target: str | None) -> str | None:
    """Return where a link of `page` leads to in the repository; None if it leads elsewhere."""
    if target is None or _FOREIGN.match(target) or page.startswith("source/"):
        return None
    home = next((path for path, name in PAGES.items() if name == page), f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(home), target.partition("#")[0]))


def _site_name(path: str) -> str:
    """Return how the site calls what lies at `path` in the repository."""
    if path in PAGES:
        return PAGES[path]
    return f"source/{path}.md" if _is_source(path) else posixpath.relpath(path, "docs")


def _is_source(path: str) -> bool:
    """Say whether it is a file or folder of the repository that is no page."""
    return path not in PAGES and not path.startswith("docs/") and (ROOT / path).exists()


def _source(path: str) -> str:
    """Return a page that shows a file, or the files of a folder."""
    found = ROOT / path
    files = sorted(p for p in found.rglob("*") if p.is_file()) if found.is_dir() else [found]
    parts = [f"# {path}"]
    for file in files:
        if file.suffix in LANGUAGES:
            if found.is_dir():
                parts.append(f"## {file.relative_to(found)}")
            text = file.read_text(encoding="utf-8").rstrip()
            parts.append(f"````{LANGUAGES[file.suffix]}\n{text}\n````")
    return "\n\n".join(parts) + "\n"
