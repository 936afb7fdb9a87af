"""The `dflash eval` and `dflash export` commands. Imports nothing heavy: `--help` must answer at once.

Next: evaluate.py and export.py.
"""

from __future__ import annotations

import click

from shared.config import options_of
from stage2_train.config_eval import EvalConfig, ExportConfig


@click.command("eval")
@options_of(EvalConfig)
def evaluate(config: EvalConfig) -> None:
    """Measure the acceptance length by speculative decoding, and check that the text is the target's own.

    Acceptance length: tokens gained per verification by the target, its own token counted (1 = nothing gained).
    Exit code 62 when a greedy text differs from the target's by more than a numerical tie.

    \b
    dflash eval --run runs/x-train --data heldout.jsonl
    dflash eval --run runs/x-train --data bench/ --limit 100 --batch-size 64 --check-prompts 16
    dflash eval --run runs/x-train --data rows --untrained
    """
    from stage2_train.evaluate import evaluate as run

    run(config)


@click.command()
@options_of(ExportConfig)
def export(config: ExportConfig) -> None:
    """Write the Hugging Face folder that z-lab's code, SGLang and vLLM read.

    The folder is reloaded and compared with the checkpoint before it appears under its name.

    \b
    dflash export --run runs/x-train --out drafter
    """
    from stage2_train.export import export as run

    run(config)
