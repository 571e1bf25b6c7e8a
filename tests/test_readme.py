"""What the README shows is what is there: the example runs, the figures are filled in, the tree is as drawn."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def _example() -> str:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]


def test_the_example_is_the_file_it_names():
    file = (ROOT / "examples" / "minimal.py").read_text()
    docstring, code = file.split('"""\n\n', 1)
    assert _example() == code
    assert "torchrun --nproc-per-node=4 examples/minimal.py" in README and "examples/minimal.py" in docstring


def test_the_example_runs():
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "minimal.py")], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0, done.stderr
    (difference,) = re.findall(r"largest difference from dense attention: ([\d.e+-]+)", done.stdout)
    assert float(difference) < 1e-5


def test_the_pictures_are_there_and_small():
    pictures = [ROOT / path for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)]
    assert pictures
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 100_000


def test_nothing_is_left_to_fill_in():
    assert "DEMO_" not in README
    for folder in re.findall(r"^(\S+/)\s", README.split("## The tree")[1], re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder
