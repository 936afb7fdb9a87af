"""The example that reads a store with zarr alone prints a document's own features, in either precision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_store import HIDDEN, LENGTHS, TAPS, make_small_store

EXAMPLE = Path(__file__).parent.parent / "examples" / "read_store.py"


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_the_example_prints_the_first_document(tmp_path: Path, precision: str) -> None:
    made = make_small_store(tmp_path / "x.zarr", precision)
    done = subprocess.run([sys.executable, EXAMPLE, made.path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    arrays, tokens = made.arrays[0], LENGTHS[0][0]
    if precision == "int8":
        token, channel = arrays["hidden_states_scale"][:tokens, :, None], arrays["hidden_states_channel"]
        features = arrays["hidden_states_q"][:tokens].astype(np.float32) * token * channel
    else:
        features = (arrays["hidden_states"][:tokens].astype(np.uint32) << 16).view(np.float32)
    last = done.stdout.splitlines()[-1]
    assert f"features ({tokens}, {TAPS}, {HIDDEN})" in last
    shown = np.array(last.rpartition("mean size [")[2].rstrip("]").split(), np.float64)
    np.testing.assert_allclose(shown, np.abs(features).mean(axis=(0, 2)), rtol=1e-4)
