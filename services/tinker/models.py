"""Models that clients train: a learner for each kind of adapter, which they take turns in.

A learner holds a frozen base, or all weights; the tensors that are trained, their gradients and
moments are swapped with another model's without a copy.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.proto.records import AdapterFacts, Manifest
from umbra.services.config import RunConfig, TrainerConfig
from umbra.services.modeling.lora import adapter_targets, add_adapter, factors, first_factors
from umbra.services.modeling.micro_batch import Tokens
from umbra.services.modeling.model_directory import weights_checksum
from umbra.services.process.files import DISK
from umbra.services.tinker.bodies import TrainedShape
from umbra.services.tinker.losses import check_datum, column, settings_of, token_losses
from umbra.services.tinker.wire import Array, PassRequest
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import export_policy, load_policy
from umbra.services.trainer.snapshot import tensor_layout, whole_weights, write_shards
from umbra.services.weights.manifest import build_manifest

ALPHA = 32.0  # of all adapters, as the service that the API comes from has it


def adapter_config(
    shape: TrainedShape, base: TrainerConfig, model: PreTrainedModel
) -> TrainerConfig:
    """Return the settings of an adapter of `shape`; UsageError if no layer would have one."""
    head = model.get_output_embeddings()
    heads = [name for name, module in model.named_modules() if module is head]
    linear, experts = adapter_targets(model, [])
    chosen = [
        name
        for name in (*linear, *experts)
        if (shape.train_attn if "attn" in name or "attention" in name else shape.train_mlp)
    ]
    chosen += heads if shape.train_unembed else []
    if not chosen:
        raise UsageError("lora_config: no layer of the model is trained by it")
    return msgspec.structs.replace(
        base, lora_rank=shape.rank, lora_alpha=ALPHA, lora_targets=chosen, lora_publish="adapter"
    )


def put_adapter(
    model: PreTrainedModel, shape: TrainedShape, config: RunConfig
) -> AdapterFacts | None:
    """Put the adapter of `shape` into `model`; None if all weights are trained."""
    if not shape.rank:
        return None
    with warnings.catch_warnings():
        # Of a tied output layer: the adapter is never merged here, so nothing is lost.
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        add_adapter(model, adapter_config(shape, config.trainer, model), 0, merged=False)
    return AdapterFacts(base=weights_checksum(config.model.name), rank=shape.rank, alpha=ALPHA)


class ModelFacts(msgspec.Struct, frozen=True):
    """A model as its client asked for it."""

    id: str
    session: str
    shape: TrainedShape
    seed: int
    created: float
    source: str = ""  # file of the state that it began with
    with_optimizer: bool = False
    user_metadata: dict[str, Any] | None = None


@dataclass(eq=False)
class Trainee:
    """The state of one model while it is not in its learner, and what has become of it."""

    facts: ModelFacts
    data: list[Tensor]
    gradients: list[Tensor | None]
    moments: defaultdict[Tensor, Any] = field(default_factory=lambda: defaultdict(dict))
    faulty: bool = False  # a pass since the last step failed
    passes: int = 0  # whose gradients wait for a step
    cost_s: float = 0.0  # of the work since the last snapshot


class Bench:
    """A learner, and the models of one shape that take turns in it."""

    def __init__(self, config: RunConfig, shape: TrainedShape) -> None:
        self.shape = shape
        self.model, self._tokenizer = load_policy(config.model.name, checked=config.model.checked)
        self.adapter = put_adapter(self.model, shape, config)
        self._learner = Learner(
            self.model, config.trainer, 1, max_tokens=config.generator.max_context
        )
        self._longest = config.generator.max_context
        embedding: Any = self.model.get_input_embeddings()
        self._vocabulary: int = embedding.num_embeddings
        served = config.weight_hub.dtype_on(self._learner.device.type)
        layout = tensor_layout(self.model, served, adapter=self.adapter is not None)
        bucket = config.weight_hub.bucket_bytes
        self.manifest: Manifest = build_manifest(layout, bucket, adapter=self.adapter)
        self._names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self._first = [p.detach() for p in self._learner.parameters]
        self._held: Trainee | None = None
        self._base = weights_checksum(config.model.name)

    def begin(self, facts: ModelFacts) -> Trainee:
        """Return a model as it begins."""
        if self.shape.rank:
            drawn = first_factors(self.model, facts.seed)
            data = [
                drawn[name].to(first) for name, first in zip(self._names, self._first, strict=True)
            ]
        else:
            data = [first.clone() for first in self._first]
        trainee = Trainee(facts, data, [None] * len(data))
        if facts.source:
            self.load(trainee, Path(facts.source), optimizer=facts.with_optimizer)
        return trainee

    def run_pass(
        self, trainee: Trainee, asked: PassRequest
    ) -> tuple[list[Array], dict[str, float]]:
        """Run a forward pass, and add the gradients of its loss unless it is `forward_only`.

        Returns logprobs of the target tokens, and metrics.

        Raises:
            UsageError: the request cannot be done; part of it may be in the gradients.
        """
        settings = settings_of(asked.loss_fn, asked.config)
        for datum in asked.data:
            check_datum(datum, asked.loss_fn, self._longest, self._vocabulary)
        targets = [datum.inputs["target_tokens"] for datum in asked.data]
        if len({t.shape[1:] for t in targets}) != 1:
            raise UsageError("target_tokens of one request need the same number of columns")
        self._take(trainee)
        lengths = torch.tensor([len(datum.tokens) + 1 for datum in asked.data])
        tokens = _laid_out([datum.tokens for datum in asked.data], lengths)
        wanted = column(asked.data, "target_tokens")
        several = wanted.dim() == 2
        inputs = {
            name: column(asked.data, name)
            for name in asked.data[0].inputs
            if name != "target_tokens"
        }
        found = torch.zeros(wanted.shape)
        total = 0.0
        with torch.set_grad_enabled(not asked.forward_only):
            for micro in self._learner.pack(tokens):
                here = micro.source
                micro = replace(micro, targets=wanted[here][:, 0] if several else wanted[here])
                if several:
                    every = torch.zeros(len(here), dtype=torch.bool)
                    micro = replace(micro, support=wanted[here], whole=every)
                logprobs, _ = self._learner.score(
                    micro, torch.ones(len(here)), with_entropy=False, with_support=several
                )
                if several:
                    logprobs = logprobs[:, 1:]
                own = {name: values[here].to(logprobs) for name, values in inputs.items()}
                losses = token_losses(asked.loss_fn, settings, logprobs, own)
                loss = losses.sum()
                if not bool(torch.isfinite(loss)):
                    raise UsageError(f"the {asked.loss_fn} loss is not finite")
                if not asked.forward_only:
                    self._learner.backward(loss)
                found[here] = logprobs.detach().float().cpu()
                total += float(loss.detach())
        trainee.passes += not asked.forward_only
        parts = found.numpy()
        ends = np.cumsum([len(t) for t in targets])[:-1]
        return np.split(parts, ends), {"loss:sum": total}

    def step(self, trainee: Trainee, settings: Mapping[str, Any], max_norm: float) -> float:
        """Update the weights by the gradients since the last step; return the gradient's norm.

        Raises:
            UsageError: there are none, a pass failed, or they are not finite; they are dropped.
        """
        self._take(trainee)
        passes, faulty = trainee.passes, trainee.faulty
        if faulty or not passes:
            self.drop(trainee)
            why = "a pass since the last step failed" if faulty else "no pass since the last step"
            raise UsageError(f"optim_step: {why}, so there is no gradient: nothing is updated")
        row = self._learner.apply(settings, max_norm or float("inf"))
        trainee.passes = 0
        norm = row["grad_norm"]
        if norm is None:
            raise UsageError("optim_step: the gradient is not finite: nothing is updated")
        return norm

    def drop(self, trainee: Trainee) -> None:
        """Drop the gradients since the last step."""
        self._take(trainee)
        for parameter in self._learner.parameters:
            parameter.grad = None
        trainee.passes, trainee.faulty = 0, False

    def save(self, trainee: Trainee, path: Path) -> None:
        """Write weights and moments, whole or not at all."""
        self._take(trainee)
        tensors = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in self._learner.state(self._base).tensors().items()
        }
        _write(path, lambda file: save_file(tensors, file, {"base": self._base}))

    @torch.no_grad()
    def load(self, trainee: Trainee, path: Path, *, optimizer: bool) -> None:
        """Read what `save` wrote; without `optimizer` moments begin at zero. Gradients are dropped.

        Raises:
            UsageError: it is of another model, or of another kind of adapter.
        """
        self.drop(trainee)
        places = self._learner.state(self._base).tensors()
        named = dict(zip(self._names, self._learner.parameters, strict=True))
        with safe_open(path, "pt") as saved:
            there = set(saved.keys())
            own = {name for name in there if name.startswith("policy/")}
            base = (saved.metadata() or {}).get("base")
            if own != places.keys() or (self.shape.rank and base != self._base):
                raise UsageError(f"{path.name} is of another model or another lora_config")
            for name in own:
                places[name].copy_(saved.get_tensor(name))
            self._learner.optimizer.state = defaultdict(dict)
            for name in there - own if optimizer else ():
                of, _, key = name.removeprefix("policy-optimizer/").rpartition(".")
                value = saved.get_tensor(name)
                self._learner.optimizer.state[named[of]][key] = value.to(named[of].device)

    def publish(self, trainee: Trainee, path: Path) -> str:
        """Write the weights as the engine loads them; return their checksum."""
        self._take(trainee)
        data = bytearray(self.manifest.total_bytes)
        write_shards(self.model, self.manifest, memoryview(data))
        _write(path, lambda file: Path(file).write_bytes(data))
        return xxhash.xxh3_128_hexdigest(data)

    def export(self, trainee: Trainee, path: Path, name: str) -> None:
        """Write a folder that others load: of peft for an adapter, else of Transformers."""
        self._take(trainee)
        if self.adapter is None:
            weights = whole_weights(self.model)
            export_policy(self.model, self._tokenizer, path, weights)
            return
        path.mkdir(parents=True, exist_ok=True)
        found = factors(self.model)
        layers = sorted({key.rpartition(".lora_")[0] for key in found})
        facts = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": name,
            "r": self.shape.rank,
            "lora_alpha": ALPHA,
            "target_modules": layers,
            "bias": "none",
        }
        tensors = {f"base_model.model.{key}": t.detach().cpu().clone() for key, t in found.items()}
        _write(path / "adapter_model.safetensors", lambda file: save_file(tensors, file))
        DISK.replace(path / "adapter_config.json", msgspec.json.encode(facts))

    def _take(self, trainee: Trainee) -> None:
        """Load the state of `trainee` into the learner, and put the present one away."""
        learner, held = self._learner, self._held
        if held is trainee:
            return
        if held is not None:
            held.data = [p.data for p in learner.parameters]
            held.gradients = [p.grad for p in learner.parameters]
            held.moments = learner.optimizer.state
        for parameter, data, gradient in zip(
            learner.parameters, trainee.data, trainee.gradients, strict=True
        ):
            parameter.data, parameter.grad = data, gradient
        learner.optimizer.state = trainee.moments
        self._held = trainee


class Benches:
    """The learners that there are, opened as they are asked for."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._open: dict[TrainedShape, Bench] = {}

    def of(self, shape: TrainedShape) -> Bench:
        if shape not in self._open:
            self._open[shape] = Bench(self._config, shape)
        return self._open[shape]


def seed_of(model_id: str, given: int | None) -> int:
    """Return the seed of an adapter's first weights: a model that is made again begins alike."""
    return zlib.crc32(model_id.encode()) if given is None else given


def _laid_out(sequences: list[Array], lengths: Tensor) -> Tokens:
    """Lay out sequences whose every position predicts something: each has one more token.

    What that is does not matter, as the targets are the client's and not the next tokens.
    """
    ids = torch.from_numpy(np.concatenate([part for s in sequences for part in (s, [0])]))
    first = lengths.cumsum(0) - lengths
    learned = torch.ones(len(ids), dtype=torch.bool)
    learned[first] = False
    owner = torch.arange(len(lengths)).repeat_interleave(lengths - 1)
    return Tokens(ids.long(), lengths, learned.nonzero().squeeze(1), owner)


def _write(path: Path, write: Any) -> None:
    """Have a file written beside `path`, sync it and give it its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    write(scratch)
    fd = os.open(scratch, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    scratch.rename(path)
    DISK.sync_directory(path.parent)
