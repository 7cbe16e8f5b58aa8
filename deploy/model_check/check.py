"""All comparisons of one model: as it is, or of a copy with few layers and short windows."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from umbra.deploy.model_check import comparisons
from umbra.deploy.model_check.comparisons import Outcome, Row
from umbra.proto.errors import StartupError, UmbraError, UsageError
from umbra.services.generator.vllm import check as vllm_check
from umbra.services.modeling import architectures
from umbra.services.modeling.architectures import keeps_state, layer_kinds
from umbra.services.modeling.model_directory import check_model_dir, weights_bytes
from umbra.services.modeling.models import read_weights
from umbra.services.modeling.pretrained import AS_IT_IS, loading, read_transformers_config
from umbra.services.modeling.reference import Reference
from umbra.services.trainer.policy import load_policy

LARGE = 600_000_000  # bytes of weights; a copy is made of larger models
WINDOW = 16  # tokens; the sequences that are compared are longer


def check_model(path: Path, layers: int = 0, *, vllm: bool = True, workers: int = 1) -> Outcome:
    """Compare Umbra with plain Transformers on the model in `path`; UsageError if it is refused.

    The copy that is compared has so many `layers`; 0 = all, or few of a large model. With `vllm`
    vLLM is compared too, if it is installed; `workers` divide the model there.
    """
    directory = check_model_dir(path, "PATH")
    config = architectures.read_config(directory, "PATH")
    kind = str(config.get("model_type", ""))
    architectures.check_architecture(directory, "PATH", [kind])
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it reports the layers that a copy leaves out
    try:
        with TemporaryDirectory(prefix="umbra-check-") as scratch:
            subject = take(directory, Path(scratch), layers, [kind])
            rows = list(_compare(directory, subject.directory, Path(scratch), [kind]))
            if vllm:
                compared = compare_vllm(subject.directory, subject.config, [kind], workers)
                rows += _tried("vLLM", compared)
    finally:
        transformers_logging.set_verbosity(verbosity)
    return Outcome(str(path), architectures.architecture(config), kind, subject.cuts, rows)


def _compare(original: Path, directory: Path, scratch: Path, checked: list[str]) -> Iterator[Row]:
    reference = Reference(directory)
    policy, tokenizer = load_policy(directory, "PATH", checked)
    yield from _tried("training", comparisons.training(policy, reference))
    before = comparisons.publish(policy)
    vllm_check.change(policy, torch.float32)
    versions = before, comparisons.publish(policy)
    rows = comparisons.torch_engine(directory, reference, versions, checked)
    yield from _tried("torch engine", rows)
    del reference, before, versions, rows
    yield from _tried("publishing", comparisons.publishing(directory, policy, checked))
    rows = comparisons.export(original, policy, tokenizer, scratch, checked)
    yield from _tried("export", rows)


def _tried(name: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield `rows`, and one more if an untested architecture raises."""
    try:
        yield from rows
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError,
        RuntimeError, TypeError, UmbraError, ValueError,
    ) as error:  # fmt: skip
        first = str(error).partition("\n")[0]
        yield Row(name, math.nan, 0, "", f"{type(error).__name__}: {first}")


def compare_vllm(
    directory: Path, config: Any, checked: Collection[str] = (), workers: int = 1
) -> Iterator[Row]:
    """Yield rows about vLLM on the model in `directory`; one if vLLM is left out."""
    try:
        result = vllm_check.vllm_differences(
            directory,
            comparisons.publish,
            checked=checked,
            threads=torch.get_num_threads(),
            tensor_parallel=workers,
        )
    except (UsageError, StartupError) as error:
        if isinstance(error, StartupError) and vllm_check.on_gpu():
            raise
        yield Row("logprobs of vLLM", None, 0.0, "nats", str(error).partition("\n")[0])
        return
    bound = comparisons.vllm_bound(config, result.dtype)
    unit = "nats" if result.dtype == "float32" else "nats in the mean"
    yield Row("logprobs of vLLM, from disk", result.from_disk, bound, unit)
    yield Row("logprobs of vLLM, the same weights published", result.same, bound, unit)
    yield Row("logprobs of vLLM, others published", result.changed, bound, unit)
    place, names = f"weights in {result.workers} of vLLM's workers", ", ".join(result.stale[:3])
    yield Row(place, len(result.stale), 0.0, "parameters", names)


class Subject(NamedTuple):
    """A model directory, Transformers' config of it, and what a copy lacks."""

    directory: Path
    config: PreTrainedConfig
    cuts: Sequence[str]


def take(original: Path, scratch: Path, layers: int, checked: Collection[str]) -> Subject:
    """Return the model in `original`, or a copy of it below `scratch`; UsageError if it won't load.

    Keeps so many `layers`; 0 = all, or as few as have every kind of layer of a `LARGE` model.
    """
    with loading(original, "PATH"):
        config = read_transformers_config(original)
    count: int = config.num_hidden_layers
    fewest = fewest_layers(config)
    remaining = min(count, max(layers, fewest) if layers else count)
    if not layers and weights_bytes(original) > LARGE:
        remaining = min(count, fewest)
    window = getattr(config, "sliding_window", None) or 0
    cuts: list[str] = []
    if remaining < count:
        cuts.append(f"the first {remaining} of {count} layers")
    if window > WINDOW:
        cuts.append(f"windows of {WINDOW} tokens instead of {window}")
    if not cuts:
        return Subject(original, config, cuts)
    copy, kind = scratch / "copy", AutoModelForCausalLM
    copy.mkdir(parents=True)
    (copy / "config.json").write_text(json.dumps(_cut(config, remaining)), encoding="utf-8")
    with loading(original, "PATH"):
        smaller = read_transformers_config(copy)
        model = read_weights(kind, original, torch.float32, "PATH", checked, config=smaller)
        model.save_pretrained(copy)
        AutoTokenizer.from_pretrained(original, **AS_IT_IS).save_pretrained(copy)
    return Subject(copy, smaller, cuts)


def fewest_layers(config: PreTrainedConfig) -> int:
    """Return how many of the first layers hold every kind of layer, at least 2.

    Kinds of attention don't count: `_cut` gives the copy all of them.
    """
    fields, count, kinds = config.to_dict(), config.num_hidden_layers, layer_kinds(config)
    last = max((kinds.index(kind) + 1 for kind in kinds), default=0)
    fewest = max(2, last if keeps_state(config) else len(set(kinds)))
    fewest = max(fewest, int(fields.get("first_k_dense_replace") or 0) + 1)
    for key, values in fields.items():
        if key != "layer_types" and isinstance(values, list) and len(values) == count:
            fewest = max(fewest, *(values.index(value) + 1 for value in values))
    return min(count, fewest)


def _cut(config: PreTrainedConfig, layers: int) -> dict[str, Any]:
    """Return the config's fields with so many layers, kinds of attention in turn."""
    fields, count = config.to_dict(), config.num_hidden_layers
    for key, values in fields.items():
        if isinstance(values, list) and len(values) == count:
            fields[key] = values[:layers]
    kinds = list(dict.fromkeys(layer_kinds(config)))
    if kinds and not keeps_state(config):
        fields["layer_types"] = [kinds[index % len(kinds)] for index in range(layers)]
    fields["num_hidden_layers"] = layers
    if (fields.get("sliding_window") or 0) > WINDOW:
        fields["sliding_window"] = WINDOW
    return fields
