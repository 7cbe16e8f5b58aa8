"""`umbra check-model`: is Umbra right for this model?"""

from __future__ import annotations

import json
from pathlib import Path

import click

from umbra.proto.errors import EXIT_DONE, UsageError


@click.command("check-model")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--layers", type=click.IntRange(0), default=0, show_default=True,
    help="Compare a copy with the first so many layers; 0 = all, or few if the model is large.",
)  # fmt: skip
@click.option("--vllm/--no-vllm", default=True, help="Compare vLLM too, if it is installed.")
@click.option(
    "--tensor-parallel", "workers", type=click.IntRange(1), default=1, show_default=True,
    help="GPUs (without any: processes) that divide the model in vLLM.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object.")
def command(path: Path, layers: int, vllm: bool, workers: int, as_json: bool) -> int:
    """Compare what Umbra computes with the model in PATH with plain Transformers.

    Logprobs and gradients of packed rows, tokens that the engines sample before and after their
    weights change, weights that are published and exported: each has a row of the table. In
    float32 on the CPU; vLLM on GPUs in bfloat16. The exit code is 0 if nothing differs, and 2 if
    something does or the model is refused.
    """
    from umbra.deploy.model_check.check import check_model  # brings torch
    from umbra.services.modeling.architectures import PROVEN

    outcome = check_model(path, layers, vllm=vllm, workers=workers)
    click.echo(json.dumps(outcome.as_dict()) if as_json else outcome.as_text())
    if not outcome.equal:
        raise UsageError(
            f"{path} is a {outcome.architecture}, with which Umbra does not compute what "
            "Transformers does: train another model, or report the table above"
        )
    if outcome.model_type not in PROVEN and not as_json:
        click.echo(
            f"{outcome.model_type} is not among the architectures that Umbra is tested with: set "
            f'model.checked = ["{outcome.model_type}"] in the run file'
        )
    return EXIT_DONE
