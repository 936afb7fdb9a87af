"""The fault matrix: what is done to a run, and the only right name for it.

One line of `dflash why` must be true for each of these, in every phase of a worker's life, on any rank and at any
moment (the seed decides). Played by tests/fault_matrix.py (score sheet) and tests/test_fault_matrix.py; how, is in
fault_run.py.
"""

from __future__ import annotations

from fault_scenarios_cuda import CUDA
from fault_scenarios_hosts import DISKS, MEMORY, TREES
from fault_scenarios_lives import HEALTHY, LIVES
from fault_scenarios_workers import ENDINGS, HANGS, SIGNALS

SCENARIOS = [*ENDINGS, *SIGNALS, *HANGS, *DISKS, *MEMORY, *TREES, *LIVES, *HEALTHY, *CUDA]
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
