"""What the documentation shows runs, and what it names exists."""

import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)


PAGES_THAT_RUN = [ROOT / "docs" / name for name in ("production.md", "what-bert-returns.md")]


@pytest.mark.parametrize("page", PAGES_THAT_RUN, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    with warnings.catch_warnings():
        for number, block in enumerate(python_blocks(page)):
            exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def test_measured_figures_in_a_table_are_those_that_the_code_of_the_page_checks():
    page = ROOT / "docs" / "what-bert-returns.md"
    code = "\n".join(python_blocks(page))
    rows = "\n".join(re.findall(r"^\|.*\|$", page.read_text("utf-8"), flags=re.MULTILINE))
    figures = set(re.findall(r"\b\d+\.\d+\b", rows))
    figures |= {f"0.{percent:0>2}" for percent in re.findall(r"\b(\d+) %", rows)}
    assert len(figures) > 10
    assert not {figure for figure in figures if figure not in code}


def test_the_first_code_of_the_readme_runs(minilm):
    namespace = {}
    exec(python_blocks(ROOT / "README.md")[0], namespace)
    pipe, texts, y = (namespace[name] for name in ("pipe", "texts", "y"))
    assert pipe.score(texts[2000:3000], y[2000:3000]) > 0.7  # chance is 0.5; TF-IDF has about 0.71


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    text = page.read_text("utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    for link in links:
        assert "://" in link or (page.parent / link).exists(), link
    for name in re.findall(r"`((?:examples|docs|tests|benchmarks|sklearn_bert)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"^\| \d+ \| `([\w./]+)`", text, flags=re.MULTILINE):
        assert (ROOT / "sklearn_bert" / name).exists(), name


def test_the_architecture_page_lists_every_file():
    listed = set(
        re.findall(
            r"^\| (\d+) \| `([\w./]+)`",
            (ROOT / "docs" / "architecture.md").read_text("utf-8"),
            flags=re.MULTILINE,
        )
    )
    from test_architecture import STOREYS

    expected = {
        (str(storey), name.split("/")[0] + ("/" if "/" in name else ""))
        for name, storey in STOREYS.items()
        if name not in ("__init__.py", "datasets/__init__.py")
    }
    assert listed == expected


def test_the_demos_table_in_the_readme_is_a_table_of_all_layers():
    rows = re.findall(r"^\| (\d) .*\|$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert rows == [str(layer) for layer in range(7)]
