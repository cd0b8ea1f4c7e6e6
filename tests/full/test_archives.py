"""The archives of the studies: small, and what the pages say is what `bapo compare` finds in them."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.contrasts import at_budgets, pair_of
from benchmarks.contrasts import markdown as lines_of
from benchmarks.which_method import BEGIN, END, markdown, rows_of
from studies.compare.accuracy import at_equal_responses, means_at
from studies.compare.gather import Compared, gather
from studies.compare.tables import points

ARCHIVES = sorted(Path("docs/studies").glob("*.tar.xz"))
RESULTS, WHICH_METHOD = Path("docs/results.md"), Path("docs/which_method.md")
STUDIES = {"mathematics": ("words", "latex"), "countdown": ("cd34", "cd4")}
"""In the order of the columns of the page's table of other tasks."""
NAMES = {"`bapo-reuse`": "bapo-reuse", "BAPO": "bapo", "DAPO": "dapo", "GRPO": "grpo"}


def unpack(name: str, into: Path) -> None:
    with tarfile.open(f"docs/studies/{name}.tar.xz") as archive:
        archive.extractall(into, filter="data")


def unpacked(name: str, into: Path) -> Compared:
    unpack(name, into)
    return gather([into])


def rows_between(text: str, heading: str, end: str) -> Iterator[list[str]]:
    """Cells of the table rows of a section."""
    section = text.split(heading, 1)[1].split(end, 1)[0]
    for line in section.splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """The chain study with all its arms."""
    folder = tmp_path_factory.mktemp("study-chain")
    for name in ("chain", "chain-arms", "chain-ours"):
        unpack(name, folder)
    return gather([folder])


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return unpacked("controls", tmp_path_factory.mktemp("study-controls"))


def test_archives_are_under_3_mb_each_and_6_mb_together() -> None:
    sizes = {path.name: path.stat().st_size for path in ARCHIVES}
    assert max(sizes.values()) < 3e6, sizes
    assert sum(sizes.values()) < 6e6, sizes


def test_no_archive_names_a_machine() -> None:
    for path in ARCHIVES:
        with tarfile.open(path) as archive:
            for entry in archive:
                if entry.name.endswith(("run.json", "config.toml")):
                    file = archive.extractfile(entry)
                    assert file is not None
                    assert not re.search(r'"(/[a-z]+){2}|"host"', file.read().decode()), f"{path}: {entry.name}"


def test_the_chain_table_of_the_results_is_that_of_the_records(chains: Compared) -> None:
    methods = {method.name: method for method in chains.methods}
    rows = [row for row in rows_between(RESULTS.read_text(), "## Chains", "After Holm") if " - " in row[0]]
    assert len(rows) == 6
    for title, *cells in rows:
        method, reference = (methods[NAMES[name.partition(",")[0]]] for name in title.split(" - "))
        for split, cell in zip(("chain", "chain@0.3", "chain-long", "chain-long@0.3"), cells, strict=True):
            found = at_equal_responses(method, reference, split)
            assert not isinstance(found, str)
            assert points(found.difference) == cell, f"{title}, {split}"


def test_the_table_of_methods_is_that_of_the_records(chains: Compared) -> None:
    page = WHICH_METHOD.read_text().split(BEGIN, 1)[1].split(END, 1)[0].strip()
    assert markdown(chains, rows_of(chains, "chain", "grpo"), "chain", "grpo") == page


@pytest.mark.parametrize("name", STUDIES)
def test_the_table_of_other_tasks_is_that_of_the_records(name: str, tmp_path: Path) -> None:
    methods = {method.name: method for method in unpacked(name, tmp_path).methods}
    column = 1 if name == "mathematics" else 3
    rows = [row for row in rows_between(RESULTS.read_text(), "## Other tasks", "is **not** ahead") if "[" in row[1]]
    assert len(rows) == 4
    pair = ""
    for title, *cells in rows:
        pair = title.partition(",")[0] if " - " in title else pair
        method, reference = (methods[NAMES[name]] for name in pair.split(" - "))
        for number, split in enumerate(STUDIES[name], start=column - 1):
            found = at_equal_responses(method, reference, f"{split}@0.3" if "T = 0.3" in title else split)
            assert not isinstance(found, str)
            assert points(found.difference) == cells[number], f"{title}, {split}"


def check_contrasts(compared: Compared, page: str, heading: str, end: str, split: str = "chain") -> None:
    """That a page has the table of contrasts that its records give."""
    rows = list(rows_between(Path(f"docs/studies/{page}.md").read_text(), heading, end))[1:]
    assert rows
    pairs = [pair_of(compared, method, reference) for method, _, reference in (row[0].partition(" - ") for row in rows)]
    found = list(lines_of(at_budgets(pairs, split)))[2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in found] == rows


def test_the_contrasts_of_the_mixture_are_those_of_the_records(tmp_path: Path) -> None:
    mixture = unpacked("mixture", tmp_path)
    check_contrasts(mixture, "mixture", "## Result", "**Verdict")
    check_contrasts(mixture, "mixture", "## The other arms", "Without")


def test_the_contrasts_of_the_review_are_those_of_the_records(tmp_path: Path) -> None:
    check_contrasts(unpacked("review", tmp_path), "review", "## Result", "**Verdict", "chain-easy")


def test_the_contrasts_of_head_starts_are_those_of_the_records(tmp_path: Path) -> None:
    check_contrasts(unpacked("head_starts", tmp_path), "head_starts", "## Result", "**Verdict")


def test_the_contrasts_of_the_controls_are_those_of_the_records(controls: Compared) -> None:
    check_contrasts(controls, "chain", "## Controls", "**1.")
    check_contrasts(controls, "chain", "**The settings of before", "So the lead")


def test_the_table_of_tuning_is_that_of_the_records(tmp_path: Path) -> None:
    methods = {method.name: method for method in unpacked("tuning", tmp_path).methods}
    rows = list(rows_between(Path("docs/studies/chain.md").read_text(), "## Tuning", "**The settings"))[1:]
    assert [name for name, *_ in rows] == list(methods)
    for name, _, *cells in rows:
        found = [means_at(run, "chain", 30720) for run in methods[name].runs]
        means = [100 * fmean(one.values()) for one in found if not isinstance(one, str)]
        assert cells == [f"{value:.1f}" for value in (fmean(means), *means)], name


def test_what_grpo_needs_for_the_accuracy_of_bapo_reuse_is_what_the_records_say(controls: Compared) -> None:
    rows = list(rows_between(Path("docs/studies/chain.md").read_text(), "**3. GRPO", "## Tuning"))[1:]
    pair = pair_of(controls, "grpo-61k", "grpo-61k")
    for (_, found, _), (_, accuracy) in zip(
        at_budgets([pair], "chain", [30720, 38400, 46080, 53760, 61440]), rows, strict=True
    ):
        assert f"{100 * found.method:.1f}" == accuracy


def test_the_lead_over_grpo_at_four_budgets_is_that_of_the_records(controls: Compared) -> None:
    rows = list(rows_between(Path("docs/studies/chain.md").read_text(), "**2.", "This corrects"))[1:]
    pairs, budgets = [pair_of(controls, "reuse-8000", "grpo-8000")], (7680, 15360, 23040, 30720)
    for split, column in (("chain", 1), ("chain@0.3", 3), ("chain-long", 4), ("chain-long@0.3", 5)):
        for (_, found, p), row in zip(at_budgets(pairs, split, budgets), rows, strict=True):
            assert row[column].endswith(points(found.difference)), f"{split}, {row[0]}"
            assert column > 1 or row[2] == p
