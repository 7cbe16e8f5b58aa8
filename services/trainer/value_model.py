"""What gives values: a model of its own with a value head, or a head on the policy's hidden states.

Both see a batch as the policy does: packed rows, of which only the positions matter that come
before a learned token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.micro_batch import MicroBatch
from umbra.services.modeling.sequence_parallel import SequenceGroup, SequenceParallel
from umbra.services.trainer.filling import place, read
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import no_progress_bars, open_backbone
from umbra.services.trainer.ranks import Ranks
from umbra.services.trainer.sharding import offloaded, prepare_layers, shard
from umbra.services.trainer.snapshot import whole_weights

HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """One number of a hidden state; it begins at 0, so that the first advantages are rewards.

    Args:
        width: of the hidden states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values float32 [N] of hidden states [N, H]."""
        return nn.functional.linear(hidden.float(), self.weight, self.bias).squeeze(-1)

    def load(self, directory: Path) -> None:
        """Start from what `directory` holds of an earlier run, if it holds a head.

        Raises:
            UsageError: the head is of another width.
        """
        if not (directory / HEAD_FILE).exists():
            return
        stored = load_file(directory / HEAD_FILE)
        if stored["weight"].shape != self.weight.shape:
            raise UsageError(
                f"critic.path: the value head in {directory} has {stored['weight'].shape[1]} "
                f"inputs, but the model has {self.weight.shape[1]}: it belongs to another model"
            )
        self.load_state_dict(stored)


class Values(Protocol):
    """A source of values that learns."""

    parameters: list[nn.Parameter]

    @property
    def module(self) -> nn.Module: ...

    def look(self, micros: list[MicroBatch]) -> None:
        """The batch that is asked about next; called where the policy may run."""
        ...

    def passes(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Of each micro-batch: which learned tokens [N], and their values with gradient [N]."""
        ...

    def sync(self) -> None:
        """Have the mean of the ranks' gradients in all of them, if the passes did not see to it."""
        ...

    def save(self, directory: Path, *, keep: bool) -> None:
        """Write it; all ranks have to call it, and one `keep`s it."""
        ...


class ValueModel(nn.Module):
    """A transformer of its own and a head; it is a module so that FSDP2 sees one forward pass."""

    def __init__(
        self,
        backbone: PreTrainedModel,
        head: ValueHead,
        attention: Attention,
        group: SequenceGroup | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self._attention = attention
        self._parallel = SequenceParallel(backbone, attention, group) if group else None

    def forward(self, micro: MicroBatch) -> Tensor:
        """Values float32 [N]."""
        if self._parallel is None:
            return self._values(micro, micro)
        share = self._parallel.share(micro)
        values = self._values(share.own, share.rows, **share.arguments())
        self._parallel.check(share)
        return share.join(values)

    def _values(self, own: MicroBatch, rows: MicroBatch, **arguments: Any) -> Tensor:
        """Of the learned tokens of `own`, this rank's part of `rows`."""
        output: Any = self.backbone(
            input_ids=own.input_ids,
            position_ids=own.position_ids,
            attention_mask=self._attention.express(rows.mask),
            use_cache=False,
            **arguments,
        )
        return self.head(output.last_hidden_state.flatten(0, 1)[own.index])


class OwnModel:
    """Values by a model of its own, sharded over the ranks like the policy.

    Args:
        directory: a policy, or what `save` wrote.
        config: precision and layers, as the policy's.
        device: where it computes.
        ranks: who shares the work, with a process group that nobody else uses.
        checked: see `check_architecture`.

    Raises:
        UsageError: it cannot be loaded.
    """

    def __init__(
        self,
        directory: Path,
        config: TrainerConfig,
        device: torch.device,
        ranks: Ranks,
        checked: Collection[str] = (),
    ) -> None:
        backbone, files = open_backbone(directory, "critic.path", checked)
        head = ValueHead(backbone.config.hidden_size)
        head.load(directory)
        prepare_layers(backbone, config, device.type)
        precision = config.precision_on(device.type)
        attention = Attention.prepare(backbone, config.attention, device)
        self._model = ValueModel(backbone, head, attention, ranks.sequence)
        if ranks.world > 1:
            shard(backbone, device, ranks, config, root=self._model)
        on_host = ranks.world > 1 and offloaded(config)
        rows_at = torch.device("cpu") if on_host else device
        place(self._model, device, parameters_at=rows_at)
        if files is not None:
            read(backbone, files)
        self._model.eval()
        self._ranks = ranks
        self._device = device
        self._bf16 = precision == "bf16"
        self._micros: list[MicroBatch] = []
        self.parameters = list(self._model.parameters())

    @property
    def module(self) -> nn.Module:
        return self._model

    def look(self, micros: list[MicroBatch]) -> None:
        self._micros = micros

    def passes(self) -> Iterator[tuple[Tensor, Tensor]]:
        for micro in self._micros:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
                values = self._model(micro.to(self._device))
            yield micro.source, values

    def sync(self) -> None:
        """FSDP has reduced the gradients in the backward passes."""

    def save(self, directory: Path, *, keep: bool) -> None:
        """The backbone as a Hugging Face directory, and the head."""
        weights = whole_weights(self._model, self._ranks)
        if not keep:
            return
        head = {name: weights.pop(f"head.{name}") for name in ("weight", "bias")}
        bare = {name.removeprefix("backbone."): tensor for name, tensor in weights.items()}
        with no_progress_bars():
            self._model.backbone.save_pretrained(directory, state_dict=bare)
        save_file(head, directory / HEAD_FILE)


class PolicyHead:
    """Values by a head on the policy's last hidden states, through which no gradient goes back.

    Args:
        directory: what `save` wrote, or None.
        learner: the policy.
        ranks: as for `OwnModel`.

    Raises:
        UsageError: the head belongs to another model.
    """

    def __init__(self, directory: Path | None, learner: Learner, ranks: Ranks) -> None:
        self._head = ValueHead(learner.model.config.hidden_size)
        if directory is not None:
            self._head.load(directory)
        self._head.to(learner.device)
        self._learner = learner
        self._ranks = ranks
        self._seen: list[tuple[Tensor, Tensor]] = []
        self.parameters = list(self._head.parameters())

    @property
    def module(self) -> nn.Module:
        return self._head

    def look(self, micros: list[MicroBatch]) -> None:
        """One forward pass of the policy; its hidden states at learned tokens are kept."""
        self._seen = [(micro.source, self._learner.hidden(micro)) for micro in micros]

    def passes(self) -> Iterator[tuple[Tensor, Tensor]]:
        for source, hidden in self._seen:
            yield source, self._head(hidden)

    def sync(self) -> None:
        """The mean over the ranks, as FSDP takes it."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(self._ranks.sum(parameter.grad.cpu()) / self._ranks.world)

    def save(self, directory: Path, *, keep: bool) -> None:
        if keep:
            directory.mkdir(parents=True, exist_ok=True)
            save_file(
                {k: v.cpu() for k, v in self._head.state_dict().items()}, directory / HEAD_FILE
            )
