"""The documents: links that lead somewhere, a picture that can be drawn."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)|(?:src|href)=\"([^\"#]+)\"")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(document: Path) -> None:
    targets = [first or second for first, second in LINK.findall(document.read_text())]
    missing = [target for target in targets if "://" not in target and not (document.parent / target).exists()]
    assert not missing


def test_every_page_of_docs_is_in_the_index() -> None:
    index = (ROOT / "docs/architecture.md").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")} - {"architecture.md"}
    assert not [page for page in pages if f"({page})" not in index]


@pytest.mark.parametrize("picture", sorted(ROOT.glob("docs/**/*.svg")), ids=lambda path: path.name)
def test_pictures_are_well_formed_and_have_a_description(picture: Path) -> None:
    root = ElementTree.fromstring(picture.read_text())
    assert root.get("viewBox")
    assert root.findtext("{http://www.w3.org/2000/svg}desc")
