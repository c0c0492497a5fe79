"""The example refuses what it cannot do, before anything is built."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("transformers")

pytestmark = pytest.mark.procs


@pytest.mark.skipif(find_spec("datasets") is not None, reason="datasets is installed")
def test_a_data_set_without_its_library_is_refused_with_the_mend(root):
    command = [sys.executable, str(root / "examples/train_llama.py"), "--dataset", "wikitext"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert "--dataset needs the Hugging Face library: pip install datasets" in done.stderr
