"""A node that is left out is known by its host's name, until somebody removes what says so."""

from everstep.launcher import left_out


def test_it_is_remembered_and_let_in_again_when_the_file_is_gone(tmp_path):
    assert left_out.why(tmp_path, "n7") == ""
    left_out.remember(tmp_path / "run", "n7", "it broke", 1.0)
    path = tmp_path / "run" / "left-out" / "n7.json"
    assert left_out.why(tmp_path / "run", "n7") == (
        f"this node (n7) was left out of this job: it broke. Remove {path} to let it in again."
    )
    assert left_out.why(tmp_path / "run", "n8") == ""
    path.unlink()
    assert left_out.why(tmp_path / "run", "n7") == ""


def test_what_cannot_be_read_leaves_it_out_all_the_same(tmp_path):
    left_out.remember(tmp_path, "n7", "it broke", 1.0)
    (tmp_path / "left-out" / "n7.json").write_text("{")
    assert "nobody can read why" in left_out.why(tmp_path, "n7")
