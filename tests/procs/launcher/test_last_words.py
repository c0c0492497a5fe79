"""What a rank says last, before it is killed from inside, is in its log file and on the console (W35, long)."""

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.long, pytest.mark.timeout(120)]

TEXT = """
import os, signal, sys
for number in range(20_000):
    sys.stdout.write(f"line {number}\\n")
    sys.stderr.write(f"error {number}\\n")
sys.stdout.write("the last word")
sys.stdout.flush(); sys.stderr.flush()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("flag", ["--tee", "--redirects"])
def test_no_line_of_an_attempt_is_missing_however_it_ended(start, flag):
    job = start(TEXT, flag, "3", "--nproc-per-node", "2", "--max-restarts", "1", wrapped=None)
    ended = job.ended()
    assert ended.code == 0, ended.err[-2000:]
    for rank in ("0", "1"):
        folders = sorted((ended.run_dir / "logs").glob(f"attempt_*/{rank}"))
        assert len(folders) == 2
        killed = {name: (folders[0] / f"{name}.log").read_text() for name in ("stdout", "stderr")}
        own = [line for line in killed["stdout"].splitlines() if line.startswith(("line", "the last"))]
        if own[-1] == "the last word":  # the other was ended when this one died
            assert own[:-1] == [f"line {number}" for number in range(20_000)]
            assert killed["stderr"].count("error ") == 20_000
        assert (folders[1] / "stdout.log").read_text().splitlines()[-1] == "the last word"
    words = [(folder / "stdout.log").read_text()[-13:] for folder in (ended.run_dir / "logs").glob("attempt_0/*")]
    assert "the last word" in words, "the one that killed itself has said all"
    if flag == "--tee":
        shown = sum(
            (folder / "stdout.log").read_text().count("the last word") for folder in ended.run_dir.glob("logs/*/*")
        )
        assert shown >= 3
        assert ended.out.count("the last word") == shown, "on the console too, all of it"
        assert ended.out.count("]:line ") >= 3 * 20_000
