import ast

import pytest

from everstep.errors import UsageError
from everstep.experiments.plain import added, hunks, plain

DIFF = "--- a\n+++ b\n@@ -1,2 +1,3 @@\n one\n+two\n \n@@\n-three\n+four\n five\n"


def test_a_diff_is_taken_back():
    assert plain("zero\none\ntwo\n\nfour\nfive\nsix\n", DIFF) == "zero\none\n\nthree\nfive\nsix\n"
    assert added(DIFF) == ["two", "four"]
    assert len(hunks(DIFF)) == 2


@pytest.mark.parametrize("source", ["one\n\nfour\nfive\n", "one\ntwo\n\nfour\nfive\none\ntwo\n\n", ""])
def test_a_diff_that_does_not_fit_once_is_refused(source):
    with pytest.raises(UsageError, match="instead of once"):
        plain(source, DIFF)


@pytest.mark.parametrize("diff", ["one\n", "@@\n*one\n", " one\n"])
def test_what_is_no_diff_is_refused(diff):
    with pytest.raises(UsageError, match="no line of a diff"):
        plain("one\n", diff)


def test_resilience_costs_the_example_five_lines_and_leaves_nothing_of_itself(root):
    """The five lines of the README, counted; without them the script does not know Everstep."""
    diff = (root / "examples/train_llama.diff").read_text()
    source = (root / "examples/train_llama.py").read_text()
    assert len(added(diff)) <= 5
    nodes = list(ast.walk(ast.parse(plain(source, diff))))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.startswith("everstep")]
    assert len(source.splitlines()) < 150
