"""The README's plain loop is real: the example without its lines of resilience trains under plain torchrun.

Under FSDP2 the demo's own test runs it too (tests/procs/experiments), so that here it is in the long tier.
"""

import json
import shutil
import subprocess
import sys

import pytest

from everstep.experiments.plain import plain
from everstep.experiments.proof import read_tape

pytest.importorskip("torch")
pytest.importorskip("torchdata")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]
STEPS = 6


def torchrun(script, record, *arguments):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    job = ["--steps", str(STEPS), "--seq", "32", "--record", str(record), *arguments]
    done = subprocess.run(launch + job, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return read_tape(record.read_text().splitlines(), record.name)


@pytest.fixture(scope="module")
def script(tmp_path_factory, request):
    root = request.config.rootpath
    folder = tmp_path_factory.mktemp("plain")
    source, diff = root / "examples/train_llama.py", root / "examples/train_llama.diff"
    (folder / "train_llama.py").write_text(plain(source.read_text(), diff.read_text()))
    shutil.copy(root / "examples/models.json", folder)
    return folder / "train_llama.py"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, request):
    """The tiny configuration as somebody's local folder of a model."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    tiny = json.loads((request.config.rootpath / "examples/models.json").read_text())["tiny"]
    LlamaConfig(**tiny["config"]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("parallel", "named"),
    [pytest.param("fsdp", True, marks=pytest.mark.long, id="fsdp"), pytest.param("ddp", False, id="ddp, local folder")],
)
def test_the_plain_loop_trains_every_step_once_on_both_ranks(script, model_folder, tmp_path, parallel, named):
    model = "tiny" if named else str(model_folder)
    tape = torchrun(script, tmp_path / "record.jsonl", "--parallel", parallel, "--model", model)
    assert sorted((x.step, x.rank) for x in tape.executions) == [(s, r) for s in range(1, STEPS + 1) for r in range(2)]
    assert sorted(x.rank for x in tape.endings) == [0, 1]
    assert len({x.loss for x in tape.executions}) == 2 * STEPS, "ranks see different rows, steps differ"


def test_the_table_holds_the_published_sizes(root):
    """Parameters counted from the configurations alone: 1.24 and 8.03 thousand million."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    models = json.loads((root / "examples/models.json").read_text())
    counts = {}
    for name, entry in models.items():
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**entry["config"]))
        counts[name] = sum(p.numel() for p in model.parameters())
        assert entry["source"]
    assert counts["llama-1b"] == 1_235_814_400
    assert counts["llama-3.1-8b"] == 8_030_261_248
    assert counts["tiny"] < 200_000
