"""Programs of the docs print what their page shows: each recipe of docs/recipes.md, and those of other pages."""

import re
from pathlib import Path

import pytest

from support.pages import FENCED, python, text

RECIPES = dict(part.split("\n", 1) for part in re.split(r"(?m)^## ", text("docs/recipes.md"))[1:])


def test_there_are_recipes_for_a_newcomer() -> None:
    """At least twenty recipes, each of one screen: two blocks and at most 45 lines of code."""
    assert len(RECIPES) >= 20
    for title, recipe in RECIPES.items():
        found = FENCED.findall(recipe)
        assert [language for language, _ in found] == ["python", "text"], title
        assert found[0][1].count("\n") <= 45, title


@pytest.mark.slow
@pytest.mark.parametrize("title", [*RECIPES, "args", "testing", "context"])
def test_a_recipe_prints_what_the_page_shows(title: str, tmp_path: Path, dsn: str) -> None:
    """The file of a recipe or page, as written, prints the page's output on a fresh database."""
    page = RECIPES.get(title) or text(f"docs/{title}.md")
    (_, code), (_, printed) = FENCED.findall(page)
    (tmp_path / "recipe.py").write_text(code, encoding="utf-8")
    assert python(tmp_path, dsn, "recipe.py") == printed
