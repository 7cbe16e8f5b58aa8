"""Models that clients train: a learner for each kind of adapter, which they take turns in.

A learner holds a frozen base, or all weights; the tensors that are trained, their gradients and
moments are swapped with another model's without a copy. Losses are sums over the tokens of each
datum, by what the client sends; their formulas and defaults are from the API's documentation.
"""

from __future__ import annotations

import math
import warnings
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
from umbra.services.config import RunConfig
from umbra.services.modeling.lora import adapter_targets, add_adapter, factors, first_factors
from umbra.services.modeling.micro_batch import Tokens
from umbra.services.modeling.model_directory import weights_checksum
from umbra.services.modeling.models import pick_device
from umbra.services.tinker.wire import Adam, Array, Datum, Model, PassRequest
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import export_policy, load_policy, written_whole
from umbra.services.trainer.snapshot import tensor_layout, whole_weights, write_shards
from umbra.services.weights.manifest import build_manifest

ALPHA = 32.0  # of all adapters, as the service that the API comes from has it
CPU_PASS = 1024  # tokens of a pass on a CPU: the sampler and other kinds of models share the memory
STATE, VERSION = "state.safetensors", "version"  # files to train on, and to sample with
_RL = ("importance_sampling", "ppo", "cispo", "dro")
_INPUTS = {"cross_entropy": ("weights",), **dict.fromkeys(_RL, ("logprobs", "advantages"))}
# Settings and their defaults; NaN: it has to be given.
_SETTINGS = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": math.nan},
}


def put_adapter(model: PreTrainedModel, rank: int, config: RunConfig) -> AdapterFacts | None:
    """Put an adapter into all layers of `model`; none with rank 0: all weights are trained."""
    if not rank:
        return None
    head = model.get_output_embeddings()
    heads = [name for name, module in model.named_modules() if module is head]
    linear, experts = adapter_targets(model, [])
    targets = [*linear, *experts, *heads]
    adapter = msgspec.structs.replace(
        config.trainer, lora_rank=rank, lora_alpha=ALPHA, lora_targets=targets
    )
    with warnings.catch_warnings():
        # Of a tied output layer: the adapter is never merged here, so nothing is lost.
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        add_adapter(model, adapter, 0, merged=False)
    return AdapterFacts(base=weights_checksum(config.model.path), rank=rank, alpha=ALPHA)


@dataclass(eq=False)
class Trainee:
    """The state of one model while it is not in its learner."""

    data: list[Tensor]
    gradients: list[Tensor | None]
    moments: defaultdict[Tensor, Any] = field(default_factory=lambda: defaultdict(dict))
    faulty: bool = False  # a pass since the last step failed
    passes: int = 0  # whose gradients wait for a step
    cost_s: float = 0.0  # of the work since the last snapshot


class Bench:
    """A learner, and the models of one rank that take turns in it."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        self.rank = rank
        self.model, self._tokenizer = load_policy(config.model.path, checked=config.model.checked)
        self.adapter = put_adapter(self.model, rank, config)
        trainer = config.trainer
        on_cpu = pick_device(trainer.device, "--device").type == "cpu"
        if on_cpu and trainer.micro_tokens == "auto":
            trainer = msgspec.structs.replace(trainer, micro_tokens=CPU_PASS)
        self._learner = Learner(self.model, trainer, 1)
        self._longest = config.generator.max_context
        embedding: Any = self.model.get_input_embeddings()
        self._vocabulary: int = embedding.num_embeddings
        served = config.weight_hub.dtype_on(self._learner.device.type)
        layout = tensor_layout(self.model, served, adapter=self.adapter is not None)
        bucket = config.weight_hub.bucket_bytes
        self.manifest: Manifest = build_manifest(layout, bucket, adapter=self.adapter)
        self._names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self._first = [p.detach() for p in self._learner.parameters]
        self._active: Trainee | None = None
        self._base = self.adapter.base if self.adapter else weights_checksum(config.model.path)

    def begin(self, model: Model, source: str = "", *, optimizer: bool = True) -> Trainee:
        """Return a model as it begins, or as the folder `source` or its newest snapshot has it."""
        if self.rank:
            initial = first_factors(self.model, model.seed)
            pairs = zip(self._names, self._first, strict=True)
            data = [initial[name].to(first) for name, first in pairs]
        else:
            data = [first.clone() for first in self._first]
        trainee = Trainee(data, [None] * len(data))
        if source := source or model.state:
            self.load(trainee, source, optimizer=optimizer)
        return trainee

    def run_pass(
        self, trainee: Trainee, request: PassRequest
    ) -> tuple[list[Array], dict[str, float]]:
        """Run a forward pass, and add the gradients of its loss unless it is `forward_only`.

        Returns logprobs of the target tokens, and metrics.

        Raises:
            UsageError: the request cannot be done; part of it may be in the gradients.
        """
        data, loss_fn = request.data, request.loss_fn
        settings = _settings_of(loss_fn, request.config)
        for datum in data:
            _check_datum(datum, loss_fn, self._longest, self._vocabulary)
        if len({datum.inputs["target_tokens"].shape[1:] for datum in data}) != 1:
            raise UsageError("target_tokens of one request need the same number of columns")
        self._take(trainee)
        names = ("target_tokens", *_INPUTS[loss_fn])
        columns = {n: torch.from_numpy(np.concatenate([d.inputs[n] for d in data])) for n in names}
        targets = columns.pop("target_tokens").long()
        several = targets.dim() == 2
        scores = torch.zeros(targets.shape)
        total = 0.0
        with torch.set_grad_enabled(not request.forward_only):
            for micro in self._learner.pack(_laid_out([datum.tokens for datum in data])):
                source = micro.source
                own = targets[source]
                micro = replace(micro, targets=own[:, 0] if several else own)
                if several:
                    every = torch.zeros(len(source), dtype=torch.bool)
                    micro = replace(micro, support=own, whole=every)
                logprobs, _ = self._learner.score(
                    micro, torch.ones(len(source)), with_entropy=False, with_support=several
                )
                if several:
                    logprobs = logprobs[:, 1:]
                inputs = {name: values[source].to(logprobs) for name, values in columns.items()}
                loss = _token_losses(loss_fn, settings, logprobs, inputs).sum()
                if not bool(torch.isfinite(loss)):
                    raise UsageError(f"the {loss_fn} loss is not finite")
                if not request.forward_only:
                    self._learner.backward(loss)
                scores[source] = logprobs.detach().float().cpu()
                total += float(loss.detach())
        trainee.passes += not request.forward_only
        ends = np.cumsum([len(datum.tokens) for datum in data])
        return np.split(scores.numpy(), ends[:-1]), {"loss:sum": total}

    def step(self, trainee: Trainee, adam: Adam) -> float:
        """Update the weights by the gradients since the last step; return the gradient's norm.

        Raises:
            UsageError: there are none, a pass failed, or they are not finite: drop them.
        """
        self._take(trainee)
        if trainee.faulty or not trainee.passes:
            why = "a pass since the last step failed"
            why = why if trainee.faulty else "no pass since the last step"
            raise UsageError(f"optim_step: {why}, so there is no gradient: nothing is updated")
        settings = {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps}
        settings["weight_decay"] = adam.weight_decay
        norm = self._learner.apply(settings, adam.grad_clip_norm or math.inf)["grad_norm"]
        trainee.passes = 0
        if norm is None:
            raise UsageError("optim_step: the gradient is not finite: nothing is updated")
        return norm

    def drop(self, trainee: Trainee) -> None:
        """Drop the gradients since the last step."""
        self._take(trainee)
        for parameter in self._learner.parameters:
            parameter.grad = None
        trainee.passes, trainee.faulty = 0, False

    def save(self, trainee: Trainee, folder: Path) -> None:
        """Write weights and moments, whole or not at all."""
        self._take(trainee)
        state = self._learner.state(self._base).tensors()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        with written_whole(folder) as scratch:
            scratch.mkdir()
            save_file(tensors, scratch / STATE, {"base": self._base})

    @torch.no_grad()
    def load(self, trainee: Trainee, folder: str, *, optimizer: bool) -> None:
        """Read what `save` wrote; without `optimizer` moments begin at zero. Gradients are dropped.

        Raises:
            UsageError: it is of another model, or of another kind of adapter: nothing is changed.
        """
        self._take(trainee)
        places = self._learner.state(self._base).tensors()
        named = dict(zip(self._names, self._learner.parameters, strict=True))
        with safe_open(Path(folder) / STATE, "pt") as saved:
            names = set(saved.keys())
            own = {name for name in names if name.startswith("policy/")}
            base = (saved.metadata() or {}).get("base")
            if own != places.keys() or (self.rank and base != self._base):
                raise UsageError("the checkpoint is of another model or another lora_config")
            self.drop(trainee)
            for name in own:
                places[name].copy_(saved.get_tensor(name))
            self._learner.optimizer.state = defaultdict(dict)
            for name in names - own if optimizer else ():
                of, _, key = name.removeprefix("policy-optimizer/").rpartition(".")
                value = saved.get_tensor(name)
                self._learner.optimizer.state[named[of]][key] = value.to(named[of].device)

    def publish(self, trainee: Trainee, folder: Path) -> str:
        """Write the weights as the engine loads them; return their checksum."""
        self._take(trainee)
        data = bytearray(self.manifest.total_bytes)
        write_shards(self.model, self.manifest, memoryview(data))
        with written_whole(folder) as scratch:
            scratch.mkdir()
            (scratch / VERSION).write_bytes(data)
        return xxhash.xxh3_128_hexdigest(data)

    def export(self, trainee: Trainee, folder: Path, name: str) -> None:
        """Write a folder that others load: of peft for an adapter, else of Transformers."""
        self._take(trainee)
        if self.adapter is None:
            export_policy(self.model, self._tokenizer, folder, whole_weights(self.model))
            return
        from peft import LoraConfig

        adapter = factors(self.model)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=name,
            r=self.rank,
            lora_alpha=int(ALPHA),
            target_modules=sorted({key.rpartition(".lora_")[0] for key in adapter}),
        )
        own = {f"base_model.model.{key}": t.detach().cpu().clone() for key, t in adapter.items()}
        with written_whole(folder) as scratch:
            config.save_pretrained(str(scratch))
            save_file(own, scratch / "adapter_model.safetensors")

    def _take(self, trainee: Trainee) -> None:
        """Load the state of `trainee` into the learner, and put the present one away."""
        learner, active = self._learner, self._active
        if active is trainee:
            return
        if active is not None:
            active.data = [p.data for p in learner.parameters]
            active.gradients = [p.grad for p in learner.parameters]
            active.moments = learner.optimizer.state
        state = zip(learner.parameters, trainee.data, trainee.gradients, strict=True)
        for parameter, data, gradient in state:
            parameter.data, parameter.grad = data, gradient
        learner.optimizer.state = trainee.moments
        self._active = trainee


def _laid_out(sequences: list[Array]) -> Tokens:
    """Lay out sequences whose every position predicts something: each has one more token.

    What that is does not matter, as the targets are the client's and not the next tokens.
    """
    lengths = torch.tensor([len(ids) + 1 for ids in sequences])
    ids = torch.from_numpy(np.concatenate([part for s in sequences for part in (s, [0])]))
    learned = torch.ones(len(ids), dtype=torch.bool)
    learned[lengths.cumsum(0) - lengths] = False
    owner = torch.arange(len(lengths)).repeat_interleave(lengths - 1)
    return Tokens(ids.long(), lengths, learned.nonzero().squeeze(1), owner)


def _settings_of(loss_fn: str, config: dict[str, float]) -> dict[str, float]:
    """Return the settings of a loss; UsageError if the loss or a setting is not supported."""
    if loss_fn not in _INPUTS:
        raise UsageError(f"loss_fn {loss_fn!r} is not supported: use one of {', '.join(_INPUTS)}")
    known = _SETTINGS.get(loss_fn, {})
    settings = known | config
    for key, value in settings.items():
        if key not in known:
            raise UsageError(f"loss_fn_config[{key!r}] is no setting of {loss_fn}")
        if not 0 <= value < math.inf:
            raise UsageError(f"loss_fn_config[{key!r}] of {loss_fn} has to be a number >= 0")
    return settings


def _check_datum(datum: Datum, loss_fn: str, longest: int, vocabulary: int) -> None:
    """Raise UsageError unless `datum` has what `loss_fn` needs, and nothing else."""
    count, needed = len(datum.tokens), ("target_tokens", *_INPUTS[loss_fn])
    if not 0 < count <= longest:
        raise UsageError(f"model_input has {count} tokens; the server takes 1 to {longest}")
    for name in needed:
        if name not in datum.inputs:
            raise UsageError(f"{loss_fn} needs loss_fn_inputs[{name!r}]")
    if more := datum.inputs.keys() - set(needed):
        raise UsageError(f"{loss_fn} does not use loss_fn_inputs {sorted(more)}: leave them out")
    targets = datum.inputs["target_tokens"]
    ranks = (1, 2) if loss_fn == "cross_entropy" else (1,)
    if targets.ndim not in ranks or targets.dtype.kind != "i" or not targets.size:
        raise UsageError(f"target_tokens of {loss_fn} have the shape {list(targets.shape)}")
    for name, values in datum.inputs.items():
        if len(values) != count or values.shape != targets.shape:
            raise UsageError(
                f"loss_fn_inputs[{name!r}] has the shape {list(values.shape)}, target_tokens "
                f"{list(targets.shape)}, and model_input {count} tokens"
            )
        if values.dtype.kind == "f" and not bool((abs(values) < math.inf).all()):
            raise UsageError(f"loss_fn_inputs[{name!r}] has a number that is not finite")
    for name, ids in (("model_input", datum.tokens), ("target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise UsageError(f"{name} has a token outside of the vocabulary of {vocabulary}")


def _token_losses(
    loss_fn: str, settings: Mapping[str, float], p: Tensor, inputs: Mapping[str, Tensor]
) -> Tensor:
    """Return the loss of each token, of the shape of `p`; `inputs` are by `_INPUTS`.

    p is the policy's logprob of a target token; the ratio is to the one it was sampled with.
    """
    if loss_fn == "cross_entropy":
        return -p * inputs["weights"]
    advantages = inputs["advantages"]
    log_ratio = p - inputs["logprobs"]
    ratio = log_ratio.exp()
    if loss_fn == "importance_sampling":
        return -ratio * advantages
    if loss_fn == "dro":
        return 0.5 * settings["beta"] * log_ratio.square() - p * advantages
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    if loss_fn == "cispo":
        return -clipped.detach() * p * advantages
    return -torch.minimum(ratio * advantages, clipped * advantages)
