"""A hook of MkDocs: the documents of the root become pages, and links to them and to files go on.

Owns how a link between documents is written in the site. GitHub and the site read the same files.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT_PAGES: Final = {
    "README.md": "project/readme.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
}
"""A document of the root -> its page."""
LICENSE: Final = "project/license.md"
PAGE_OF: Final = {**ROOT_PAGES, "LICENSE": LICENSE}
LINK: Final = re.compile(r"(\]\()((?!https?:|mailto:|#)[^)\s#]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(root / name)))
    license_ = f"# License\n\n```text\n{(root / 'LICENSE').read_text('utf-8')}\n```\n"
    files.append(File.generated(config, LICENSE, content=license_))
    return files


def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    del config, files
    here = page.file.src_uri
    named = {page: name for name, page in ROOT_PAGES.items()}
    # Where the document lies in the repository, and where its page lies in the site.
    lies = PurePosixPath(named.get(here, f"docs/{here}")).parent
    return LINK.sub(lambda found: found[1] + _target(found[2], lies, here) + found[3], markdown)


def _target(link: str, lies: PurePosixPath, here: str) -> str:
    """The link of the site; a file that is no page is named by its path, unchanged."""
    path = _normal(lies / link)
    page = PAGE_OF.get(path) or path.removeprefix("docs/")
    up = "../" * here.count("/")
    return up + page


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
