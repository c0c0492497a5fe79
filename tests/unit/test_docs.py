"""What the documents say is there is there: files, flags, make targets, the diff, signatures."""

import importlib
import inspect
import re

import pytest

LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
FLAG = re.compile(r"`(--[a-z][a-z_-]+)")
TARGET = re.compile(r"(?:`|^    )make ([a-z][a-z0-9-]+)", re.MULTILINE)


CALL = re.compile(r"^\| `((?:everstep\.)?[\w.]+)(\(.*?\))` \|", re.MULTILINE)
NAMED = re.compile(r"`Run\.(\w+)")


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
    wiring = importlib.import_module("everstep.wiring")
    parser = flags.build(wiring.EXTENSIONS)
    known = {spelling for action in parser._actions for spelling in action.option_strings}
    table = (root / "README.md").read_text().split("## Flags")[1].split("\n## ")[0]
    named = set(FLAG.findall(table)) - {"--help", "--html"}
    assert sorted(named - known) == []
    assert len(named) > 8


def test_no_sequence_diagram_breaks_at_a_semicolon(root):
    """In mermaid's sequence diagrams it ends the statement, and what follows is a syntax error: nothing is drawn."""
    drawn = [
        (page.name, line)
        for page in documents(root)
        for block in re.findall(r"```mermaid\nsequenceDiagram\n(.*?)```", page.read_text(), re.DOTALL)
        for line in block.splitlines()
    ]
    assert [each for each in drawn if ";" in each[1]] == []
    assert len(drawn) > 50


def plain(thing):
    """A signature without types and without `self`."""
    signature = inspect.signature(thing)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(
        signature.replace(
            parameters=[p for p in parameters if p.name != "self"], return_annotation=inspect.Signature.empty
        )
    )


def test_the_api_page_has_every_signature_as_it_is(root):
    everstep = pytest.importorskip("everstep.training", reason="needs torch")
    shown = dict(CALL.findall((root / "docs/api.md").read_text()))
    methods = [name for name, _ in inspect.getmembers(everstep.Run, inspect.isfunction) if not name.startswith("_")]
    names = ["everstep.resilient", "everstep.training.Positioned", *(f"Run.{name}" for name in methods)]
    expected = {}
    for name in names:
        home, _, last = name.removeprefix("everstep.").rpartition(".")
        thing = everstep.Run if home == "Run" else importlib.import_module(f"everstep.{home}" if home else "everstep")
        expected[name] = plain(getattr(thing, last))
    assert shown == expected


def test_the_attributes_of_a_run_on_the_api_page_are_all_there_are(root):
    training = pytest.importorskip("everstep.training", reason="needs torch")
    source = inspect.getsource(training.Run)
    attributes = set(re.findall(r"self\.([a-z]\w*) = ", source))
    methods = {name for name, _ in inspect.getmembers(training.Run, inspect.isfunction) if not name.startswith("_")}
    assert set(NAMED.findall((root / "docs/api.md").read_text())) == attributes | methods


def test_each_test_that_the_page_on_security_names_exists(root):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (root / "docs/security.md").read_text())
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (root / file).read_text()]
    assert missing == []
    assert len(named) > 25
