"""Names on disk: what is ours says so, nothing else does."""

import pytest

from everstep.checkpoint.core import names


def test_names_are_read_back():
    staging = names.Staging(140, 0, 3, "9f3a77c1", 7)
    assert str(staging) == "step-140.0.3.9f3a77c1-7.tmp"
    assert names.staging_of(str(staging)) == staging
    assert names.step_of(names.committed(0)) == 0
    assert names.step_of(names.committed(123456789)) == 123456789
    assert names.owner_of(names.owner("9f3a77c1")) == "9f3a77c1"


@pytest.mark.parametrize(
    "name",
    ["step-", "step-01", "step-1 ", "step-1\n", "xstep-1", "step-1.tmp", "step--1", "step-1.0.0.tmp", "checkpoint-5",
     "7", "step-1.0.0.9F3A77C1-7.tmp", "step-1.0.0.9f3a77c1-7.tmp.aside", "step-1.0.0.9f3a77c1.tmp", ".everstep-x.job"],
)  # fmt: skip
def test_what_others_call_their_files_is_not_ours(name):
    assert names.step_of(name) is None
    assert names.staging_of(name) is None
    assert names.owner_of(name) is None


def test_only_files_that_we_write_are_ours_inside():
    ours = ["__0_0.distcp", "__12_0.layout.json", ".metadata", "manifest.json", "manifest.condemned.json"]
    assert all(names.OURS_INSIDE.match(name) for name in ours)
    assert not any(
        names.OURS_INSIDE.match(name) for name in ["notes.txt", "__0_0.distcp.bak", "x__0_0.distcp", "model.pt"]
    )
