"""All comparisons of one model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from umbra.deploy.model_check.outcome import Outcome, Row, vllm_bound
from umbra.deploy.model_check.serving import (
    change,
    compare_export,
    compare_publishing,
    compare_torch_engine,
    publish,
)
from umbra.deploy.model_check.subject import take
from umbra.deploy.model_check.training import compare_training
from umbra.proto.errors import StartupError, UmbraError, UsageError
from umbra.services.generator.vllm import check as vllm_check
from umbra.services.modeling.architectures import architecture, check_architecture, read_config
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.modeling.reference import Reference
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.snapshot import whole_weights


def check_model(path: Path, layers: int = 0, *, vllm: bool = True) -> Outcome:
    """Compare what Umbra computes with the model in `path` with plain Transformers.

    Args:
        layers: of the copy that is compared; 0 = all layers, or few of a large model.
        vllm: compare vLLM too, if it is installed.

    Raises:
        UsageError: no model directory, or one that Umbra refuses whatever a comparison says.
    """
    directory = check_model_dir(path, "PATH")
    config = read_config(directory, "PATH")
    kind = str(config.get("model_type", ""))
    check_architecture(directory, "PATH", [kind])
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it reports the layers that a copy leaves out
    try:
        with TemporaryDirectory(prefix="umbra-check-") as scratch:
            subject = take(directory, Path(scratch), layers, [kind])
            rows = list(_compare(directory, subject.directory, Path(scratch), kind))
            if vllm:
                rows += _tried("vLLM", compare_vllm(subject.directory, subject.config, [kind]))
    finally:
        transformers_logging.set_verbosity(verbosity)
    return Outcome(str(path), architecture(config), kind, subject.cuts, rows)


def _compare(original: Path, directory: Path, scratch: Path, kind: str) -> Iterator[Row]:
    checked = [kind]
    reference = Reference(directory)
    policy, tokenizer = load_policy(directory, "PATH", checked)
    yield from _tried("training", compare_training(policy, reference))
    before = publish(policy)
    change(policy)
    versions = before, publish(policy)
    yield from _tried("torch engine", compare_torch_engine(directory, reference, versions, checked))
    del reference, before, versions
    yield from _tried("publishing", compare_publishing(directory, policy, checked))
    yield from _tried("export", compare_export(original, policy, tokenizer, scratch, checked))


def _tried(what: str, rows: Iterator[Row]) -> Iterator[Row]:
    """`rows`, and one more for what an architecture that nobody tried may run into."""
    try:
        yield from rows
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError,
        RuntimeError, TypeError, UmbraError, ValueError,
    ) as error:  # fmt: skip
        first = str(error).partition("\n")[0]
        yield Row(what, math.nan, 0, "", f"{type(error).__name__}: {first}")


def compare_vllm(directory: Path, config: Any, checked: Collection[str] = ()) -> Iterator[Row]:
    """Yield rows about vLLM on the model in `directory`; one if vLLM is left out."""
    try:
        found = vllm_check.vllm_differences(
            directory,
            lambda model: whole_weights(model).items(),
            checked=checked,
            threads=torch.get_num_threads(),
        )
    except (UsageError, StartupError) as error:
        yield Row("logprobs of vLLM", None, 0.0, "nats", str(error).partition("\n")[0])
        return
    bound = vllm_bound(config)
    for what, worst in (
        ("from disk", found.from_disk),
        ("the same weights published", found.same),
        ("others published", found.changed),
    ):
        yield Row(f"logprobs of vLLM, {what}", worst, bound, "nats")
