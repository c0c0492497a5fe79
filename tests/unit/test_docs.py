"""What the documents say is there is there: files, flags, make targets, the diff."""

import re

import pytest

LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
FLAG = re.compile(r"`(--[a-z][a-z_-]+)")
TARGET = re.compile(r"(?:`|^    )make ([a-z][a-z0-9-]+)", re.MULTILINE)


def documents(root):
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])


def test_every_link_leads_to_a_file(root):
    broken = [
        f"{page.relative_to(root)}: {target}"
        for page in documents(root)
        for target, _ in LINK.findall(page.read_text())
        if not target.startswith(("https://", "http://")) and not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_page_is_listed(root):
    index = (root / "docs/README.md").read_text()
    linked = {target for target, _ in LINK.findall(index)}
    pages = {str(page.relative_to(root / "docs")) for page in root.glob("docs/**/*.md")} - {"README.md"}
    assert sorted(pages - linked) == [], "pages that docs/README.md does not list"


def test_the_readme_shows_the_diff_that_is_run(root):
    shown = re.findall(r"```diff\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    assert shown == [(root / "examples/train_llama.diff").read_text()]


def test_every_make_target_that_is_named_exists(root):
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (root / "Makefile").read_text(), re.MULTILINE))
    named = {target for page in documents(root) for target in TARGET.findall(page.read_text())}
    assert len(named) > 5
    assert sorted(named - targets) == []


def test_every_flag_of_the_readme_is_one_of_everstep_run(root):
    flags = pytest.importorskip("everstep.launcher.flags", reason="needs everstep run, whose parser is torch's own")
    pytest.importorskip("torch", reason="the parser of everstep run is torch's own")
    parser = flags.build(("everstep.faults.flags:add_run_arguments",))
    known = {spelling for action in parser._actions for spelling in action.option_strings}
    table = (root / "README.md").read_text().split("## Flags")[1].split("\n## ")[0]
    named = set(FLAG.findall(table)) - {"--help", "--html"}
    assert sorted(named - known) == []
    assert len(named) > 8
