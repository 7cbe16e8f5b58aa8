"""All comparisons of one model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers.utils import logging as transformers_logging

from umbra.deploy.model_check.outcome import Outcome, Row
from umbra.deploy.model_check.serving import (
    change,
    compare_export,
    compare_publishing,
    compare_torch_engine,
    publish,
)
from umbra.deploy.model_check.subject import take
from umbra.deploy.model_check.training import compare_training
from umbra.deploy.model_check.vllm import compare_vllm
from umbra.proto.errors import UmbraError
from umbra.services.modeling.architectures import architecture, check_architecture, read_config
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.modeling.reference import Reference
from umbra.services.trainer.policy import load_policy


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
