"""The policy, its optimizer and its learning rate, on one device or sharded over several ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.config.training import learning_rate
from umbra.services.modeling.architectures import check_experts
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.experts import NO_BALANCE, NO_ROUTERS
from umbra.services.modeling.lora import add_adapter
from umbra.services.modeling.micro_batch import MicroBatch, Tokens
from umbra.services.modeling.models import WeightFiles, pick_device
from umbra.services.modeling.packing import pack
from umbra.services.modeling.scorer import ScoreOptions, Scorer
from umbra.services.trainer.checkpoints.state import ModelState
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.distributed.sharding import clip_gradients, prepare_layers, shard
from umbra.services.trainer.metrics import Row, expert_metrics
from umbra.services.trainer.optimizer import MasterWeights, make_optimizer
from umbra.services.trainer.policy import cast, place, read
from umbra.services.trainer.snapshot import whole_weights
from umbra.services.trainer.speed import Phases, row_sizes

# Why an update is left out, in the order of the columns `skipped/<reason>`.
REASONS = {
    "loss": "its loss is not finite",
    "outliers": "all its tokens have logprobs that are not finite, or more than 10,000 "
    "times the generator's probability",
    "gradient": "its gradient is not finite",
}


class Learner:
    """Scoring of micro-batches, and updates of the policy. Accelerate autocasts; sharding is ours.

    Args:
        model: the policy, float32, the same on all ranks.
        steps: length of the learning-rate schedule.
        seed: of an adapter's first weights.
        files: of the weights, if the model is on the meta device. Without them master weights of
            bf16 ones begin rounded.
        max_tokens: of the longest response, for `row_sizes`.

    Raises:
        UsageError: a device or an optional package that is not there, or settings that exclude each
            other.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        steps: int,
        ranks: Ranks | None = None,
        seed: int = 0,
        files: WeightFiles | None = None,
        max_tokens: int = 0,
    ) -> None:
        self.model, self.ranks = model, ranks or Ranks()
        self.updates = 0  # made or left out, by this process
        self._config, self._steps = config, steps
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
            torch.use_deterministic_algorithms(True)
        self.device = rank_device(config, self.ranks)
        kind = self.device.type
        if fault := next(config.device_faults(kind), ""):
            raise UsageError(fault)
        self._accelerator = Accelerator(
            cpu=kind == "cpu", mixed_precision=config.precision_on(kind)
        )
        if config.threads or self.ranks.world > 1:
            share = max(1, len(os.sched_getaffinity(0)) // self.ranks.place.per_host)
            torch.set_num_threads(config.threads or share)
        check_experts(model.config.to_dict(), config.expert_parallel)
        self.phases = Phases(self.device)  # of the thread that updates the policy
        if config.lora_rank:
            add_adapter(model, config, seed)
        if config.weights == "bf16":
            cast(model, torch.bfloat16)
        rows_at = bring_up(model, config, self.device, self.ranks)
        masters_at = rows_at if config.weights == "bf16" else None
        if config.offload == "optimizer" or (config.offload == "all" and self.ranks.world == 1):
            masters_at = torch.device("cpu")
        trained = (p for p in model.parameters() if p.requires_grad)
        self._master_weights = MasterWeights(trained, masters_at)
        if files is not None:
            read(model, files, self._master_weights.of)
            self._master_weights.push()
        self.rows = row_sizes(config, model, self.device, self.ranks, max_tokens)
        # No dropout: these must be the logprobs of the policy that generates.
        attention, chunk = Attention.prepare(model, self.device), config.logits_bytes_on(kind)
        self._scorer = Scorer(model, chunk, attention, self.ranks.sequence).eval()
        routers = self._scorer.routers
        if config.router_replay and routers is None:
            raise UsageError(NO_ROUTERS)
        if config.router_aux_loss_coef and not (
            routers is not None and hasattr(model.config, "router_aux_loss_coef")
        ):
            raise UsageError(NO_BALANCE)
        # Those whose choices are replayed.
        self.replayed = routers.kind if config.router_replay and routers is not None else None
        self.parameters = self._master_weights.parameters
        self.optimizer = make_optimizer(self.parameters, config)

    def pack(self, tokens: Tokens, sequences: Tensor | None = None) -> list[MicroBatch]:
        """Cut this rank's share of `sequences` (None: all) into micro-batches."""
        with self.phases("pack"):
            return pack(
                tokens,
                **self.rows._asdict(),
                sequences=sequences,
                share_prompts=self._config.share_prompts and self.rows.pack_tokens > 1,
                rank=self.ranks.share,
                world=self.ranks.shares,
                # A layer has about 12 weights per pair of hidden dimensions.
                pair_cost=1 / (6 * self.model.config.get_text_config().hidden_size),
            )

    def score(
        self, micro: MicroBatch, temperature: Tensor, **how: Unpack[ScoreOptions]
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs (with gradient) and entropies of the learned tokens, [N] each."""
        phase = "forward" if torch.is_grad_enabled() else "score"
        with self.phases(phase), self._accelerator.autocast():
            return self._scorer(micro.to(self.device), temperature, **how)

    @torch.no_grad()
    def logprobs(self, micros: list[MicroBatch], temperature: Tensor) -> Tensor:
        """Return logprobs of the weights, no gradient, float32 [M]; 0 for tokens not scored.

        `micros` are this rank's; the result has the logprobs of all ranks.
        """
        result = torch.zeros_like(temperature)
        for micro in micros:
            source = micro.source
            result[source] = self.score(micro, temperature[source], with_entropy=False)[0].cpu()
        return self.ranks.sum(result)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, this rank's part of a sum over all micro-batches."""
        # FSDP takes the mean over the ranks; this is a sum.
        with self.phases("backward"):
            self._accelerator.backward(loss * self.ranks.world)
            self._master_weights.collect()

    def update(self, step: int, fault: str = "") -> Row:
        """Do as `apply` with the learning rate of `step`, and the configured clipping."""
        rate = learning_rate(self._config, step, self._steps)
        return self.apply({"lr": rate}, self._config.max_grad_norm, fault)

    def apply(self, settings: Mapping[str, Any], max_norm: float, fault: str = "") -> Row:
        """Clip the gradients to `max_norm`, update the weights, drop the gradients.

        An update with a `fault` (a key of `REASONS`), or whose gradient is not finite, is left out
        and counted in `skipped`: weights and optimizer state stay as they are. `settings` are the
        optimizer's in this update, by torch's names: "lr" at least.
        """
        with self.phases("optimizer"):
            self.updates += 1
            for group in self.optimizer.param_groups:
                group.update(settings)
            norm = clip_gradients(self.parameters, max_norm, self.ranks)
            finite = bool(torch.isfinite(norm))
            fault = fault or ("" if finite else "gradient")
            if not fault:
                self.optimizer.step()
                self._master_weights.push()
            self.optimizer.zero_grad()
        return {
            "grad_norm": float(norm) if finite else None,
            "lr": settings["lr"],
            "skipped": float(bool(fault)),
            **{f"skipped/{reason}": float(reason == fault) for reason in REASONS},
        }

    def balance(self, micros: list[MicroBatch]) -> float:
        """Return a token's weight in the balance loss of an update over `micros`, for `score`.

        All ranks have to call it, each with its own share.
        """
        coefficient = self._config.router_aux_loss_coef
        if not coefficient:
            return 0.0
        count = torch.tensor([sum(micro.tokens for micro in micros)], dtype=torch.float64)
        # As in `backward`: FSDP takes a mean over the ranks.
        return coefficient * self.ranks.world / max(1.0, float(self.ranks.sum(count)))

    def expert_load(self) -> Row:
        """Return how tokens were spread over experts since the last call; all ranks call it."""
        routers = self._scorer.routers
        if routers is None:
            return {}
        load = self.ranks.sum_ranks(routers.take_load().double())
        return expert_metrics(load[:, :-1], load[:, -1] if self.replayed else None)

    def state(self, base: str = "") -> ModelState:
        """Return the state for a checkpoint; the learning rate follows from the step.

        `base` is the checksum of the weights that an adapter is trained for.
        """
        masters, alpha = self._master_weights, self._config.lora_alpha if base else 0.0
        return ModelState(
            "policy", self.model, self.optimizer, base=base, alpha=alpha, master_weights=masters
        )

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights, float32 on the CPU, adapter merged, on rank 0; all call it."""
        return whole_weights(self.model, self.ranks, self._master_weights.of)


def bring_up(
    model: PreTrainedModel,
    config: TrainerConfig,
    device: torch.device,
    ranks: Ranks,
    root: nn.Module | None = None,
) -> torch.device:
    """Shard `model` over `ranks` and place it; `root` is what runs it, if not itself.

    Returns the device of this rank's rows.
    """
    prepare_layers(model, config, device.type)
    if ranks.world > 1:
        shard(model, device, ranks, config, root)
    on_host = ranks.world > 1 and config.offload == "all"
    rows_at = torch.device("cpu") if on_host else device
    place(root or model, device, parameters_at=rows_at)
    return rows_at


def rank_device(config: TrainerConfig, ranks: Ranks) -> torch.device:
    """Return the device of this rank, and make its GPU the current one."""
    device = pick_device(config.device, "trainer.device")
    if device.type == "cpu":
        return device
    if ":" in config.device and ranks.world > 1:
        raise UsageError(
            f"trainer.device is {config.device}, but each of several ranks has its own GPU: use "
            "cuda, and CUDA_VISIBLE_DEVICES to choose"
        )
    chosen = device.index + ranks.local_rank
    if chosen >= torch.cuda.device_count():
        raise UsageError(
            f"trainer rank {ranks.rank} needs GPU {chosen}, but torch sees "
            f"{torch.cuda.device_count()}: lower trainer.ranks or change trainer.device"
        )
    torch.cuda.set_device(chosen)
    return torch.device("cuda", chosen)  # with its number: other threads begin with another one
