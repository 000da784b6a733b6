"""Every command and every line of Python in README and docs/ does what the page shows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipegraph
from pipegraph.schedule import Times, build, names, simulate
from tests.equal_work import equal_work_shared
from tests.project.pages import LANGUAGES, PAGES, ROOT, Page, Runner, agree, read_pages
from tests.torch_version import is_tested_version

IMAGES = ROOT / "docs" / "images"

# Their commands take half a minute each, the guide's together more.
SLOW = ("docs/command-line.md", "docs/guide.md", "docs/how-to.md", "docs/planning.md", "docs/weights.md")

# What no test runs: (page, what it needs). A page shows it in the first line of the block.
NOT_RUN = {
    ("docs/command-line.md", "a minute of an idle machine"),
    ("docs/guide.md", "a browser"),
    ("docs/guide.md", "two machines"),
    ("docs/how-to.md", "a minute of an idle machine"),
    ("docs/planning.md", "a minute of an idle machine"),
    ("docs/planning.md", "an idle machine"),
    ("docs/weights.md", "a checkpoint that is too large for a test"),
}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of what the pages use, so that they leave nothing in the checkout; modules from there are forgotten.

    It is the same folder for all pages, so that they share the work on the examples.
    """
    folder = tmp_path_factory.getbasetemp() / "page"
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    modules_before = set(sys.modules)
    with equal_work_shared():
        yield folder
    for name in set(sys.modules) - modules_before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(folder):
            del sys.modules[name]
    shutil.rmtree(folder)


@pytest.mark.timeout(900)  # only a hang takes that long, also on a busy machine
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(*parameter.values, id=parameter.id, marks=[pytest.mark.slow] if parameter.id in SLOW else [])
        for parameter in read_pages()
    ],
)
def test_page(page: Page, folder: Path, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    runner = Runner(page, folder, capfd.readouterr)
    renew, wrong = request.config.getoption("renew_golden"), []
    for block in page.blocks:
        for command, expected, printed in runner.run(block):
            if is_tested_version() and not block.leaves_output_out and not agree(command, expected, printed):
                where = f"{page.name}:{block.line}: $ {command}"
                wrong.append(f"{where}\n--- shown\n{expected}--- printed\n{printed}")
                if renew:
                    page.renew(command, expected, printed)
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def test_the_list_of_what_is_not_run_is_whole() -> None:
    assert {(page.name, block.needs) for page in map(Page, PAGES) for block in page.blocks if block.needs} == NOT_RUN


@pytest.mark.parametrize("page", read_pages())
def test_every_block_says_what_it_is(page: Page) -> None:
    assert {block.language for block in page.blocks} <= LANGUAGES
    texts = [block for block in page.blocks if block.language == "text"]
    assert not [block for block in texts if re.search(r"^(\$|pipegraph|python|torchrun|import) ", block.text, re.M)]


@pytest.mark.parametrize("page", read_pages())
def test_nothing_is_left_to_fill_in(page: Page) -> None:
    assert re.findall(r"@[A-Z_]+@|\b(?:TODO|FIXME|TBD|XXX)\b", page.text) == []


def test_the_pictures_are_there_and_say_nothing_of_a_machine() -> None:
    pictures = [
        (page.parent / path).resolve()
        for page in PAGES
        for path in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())
    ]
    assert set(pictures) == set(IMAGES.iterdir())
    for path in IMAGES.iterdir():
        data = path.read_bytes()
        assert len(data) < 200_000
        assert not re.search(rb"/(?:home|root|tmp|Users)/", data)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_pages_outside_of_docs_lead_somewhere(name: str) -> None:
    """Sphinx looks at those of docs/."""
    text = (ROOT / name).read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", (ROOT / (path or name)).read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, link


def test_make_demo_splits_compares_and_trains() -> None:
    done = subprocess.run(
        ["make", "--always-make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    verbs = re.findall(r"^\.venv/bin/pipegraph (\w+) (?:build|examples)/transformer", done.stdout, re.MULTILINE)
    assert verbs == ["split", "verify", "run"] and "--nproc 2" in done.stdout


def test_the_table_of_schedules_says_what_the_simulator_says() -> None:
    """A makespan is in units of the forward of all stages of a rank, and so are activations."""
    text = (ROOT / "docs" / "schedules.md").read_text()
    rows = [re.split(r" *\| *", row)[1:-1] for row in re.findall(r"^\| \[`.*$", text, re.MULTILINE)]
    assert [row[0] for row in rows] == [f"[`{name}`](#{name})" for name in names()]
    for name, row in zip(names(), rows, strict=True):
        schedule = build(name, ranks=4, microbatches=8)
        timeline = simulate(schedule, Times.equal(schedule.stages))
        scale = schedule.stages / 4
        peaks = [f"{peak / scale:g}" for peak in timeline.peak_activations]
        peak_text = ", ".join(peaks if len(set(peaks)) > 1 else peaks[:1])
        assert row[1:] == [
            str(schedule.stages),
            f"{timeline.makespan / scale:g}",
            f"{100 * timeline.bubble:.1f} %",
            peak_text,
        ]
        assert f"\n## `{name}`\n" in text


def test_every_public_name_is_on_the_page_of_the_python_api() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text()
    documented_names = set(re.findall(r"^\.\. auto\w+:: (?:\w+\.)*(\w+)$", page, re.MULTILINE))
    assert {*pipegraph.__all__, *pipegraph.schedule.__all__, "SegmentCost", "solve"} - documented_names == {
        "schedule",
        "__version__",
    }
