"""Can a run with these numbers ever fill its batches? And how stale may what it trains on get?

It is asked before a run starts (`umbra check`, `umbra up`, the buffer itself), because
the answer of a run is an hour of silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig, TrainerConfig
from umbra.services.config.branch_rules import branch_faults
from umbra.services.config.environment_rules import environment_faults
from umbra.services.config.objective_rules import objective_faults

VLLM_COOLEST = 0.01  # it raises lower temperatures to this, but for 0


@dataclass(frozen=True, slots=True)
class Staleness:
    """What a configuration implies for a trained token.

    Versions count committed batches. Each batch is m = minibatches * epochs optimizer updates, the
    last of which sees weights that m - 1 updates of the same batch have changed already.
    """

    bound: int  # versions, at most
    typical: int  # versions, of a sample that nothing overtakes
    updates: int  # optimizer updates between the weights of a token and those it trains, at most

    def describe(self) -> str:
        """One line for people."""
        text = f"at most {self.bound} versions, typically up to {self.typical}"
        if self.updates != self.bound:
            text += f"; at most {self.updates} optimizer updates, as each batch is several"
        return text


def implied_staleness(config: RunConfig) -> Staleness:
    """Return the worst and the typical staleness of `config`: K, min(A, K) and K * m + m - 1."""
    buffer, updates = config.buffer, config.trainer.updates_per_batch
    bound = buffer.max_staleness if buffer.run_ahead else 0
    return Staleness(bound, min(buffer.run_ahead, bound), bound * updates + updates - 1)


def check_feasible(config: RunConfig) -> None:
    """Refuse what can never fill a batch, must deadlock, or contradicts itself.

    Raises:
        UsageError: all that is wrong, each with the numbers to change.
    """
    faults = [
        *_groups(config),
        *_staleness(config),
        *_stages(config),
        *environment_faults(config),
        *branch_faults(config),
        *_sessions(config),
        *_sampling(config),
        *_sequence_parallel(config),
        *_hosts(config.trainer),
        *_expert_parallel(config.trainer),
        *_memory(config.trainer),
        *objective_faults(config),
    ]
    if config.trainer.lora_publish == "adapter" and not config.trainer.lora_rank:
        faults.append(
            "trainer.lora_publish = adapter has no adapter to publish: set trainer.lora_rank, or "
            "leave it at merged"
        )
    if config.trainer.router_replay and config.generator.engine == "replay":
        faults.append(
            "trainer.router_replay: the replay engine has no model and chooses no experts: set it "
            'to false, or generator.engine to "torch" or "vllm"'
        )
    evaluation = config.eval
    batch = config.buffer.group_size * config.buffer.batch_groups
    if config.trainer.minibatches > batch:
        faults.append(
            f"trainer.minibatches = {config.trainer.minibatches} is more than the {batch} samples "
            "of a batch (buffer.batch_groups * buffer.group_size): lower it"
        )
    beyond = [step for step in config.trainer.profile_steps if step > config.run.steps]
    if beyond:
        faults.append(
            f"trainer.profile_steps has step {beyond[0]}, but run.steps = {config.run.steps}: "
            "name steps from 1 to the last"
        )
    if evaluation.within and not evaluation.prompts:
        key = "every" if evaluation.every else "at_start"
        faults.append(f"eval.{key} needs eval.prompts: name a file of held-out prompts")
    if evaluation.within and evaluation.samples % evaluation.samples_per_prompt:
        faults.append(
            f"eval.samples = {evaluation.samples} is no multiple of "
            f"eval.samples_per_prompt = {evaluation.samples_per_prompt}: change one of them"
        )
    if faults:
        raise UsageError("; ".join(faults))


def _groups(config: RunConfig) -> Iterator[str]:
    buffer = config.buffer
    size = buffer.group_size
    if buffer.dynamic_sampling and size == 1:
        yield (
            "buffer.dynamic_sampling replaces every group of one sample, so no batch is ever full: "
            "set buffer.group_size to 2 or more"
        )
    if buffer.straggler_s and buffer.min_survivors > size:
        yield (
            f"buffer.straggler_s = {buffer.straggler_s:g} is for groups of {buffer.min_survivors} "
            f"samples and more, and buffer.group_size = {size}: set straggler_s to 0"
        )


def _staleness(config: RunConfig) -> Iterator[str]:
    buffer = config.buffer
    bound = implied_staleness(config).bound
    if buffer.on_batch == "interrupt" and bound == 0:
        yield (
            "buffer.on_batch = interrupt cannot continue a partial that is strictly on-policy: set "
            "buffer.run_ahead and buffer.max_staleness to 1 or more, or buffer.on_batch to continue"
        )
    if buffer.stale_policy == "wait" and buffer.oversample:
        yield (
            "buffer.stale_policy = wait waits for the spare groups of buffer.oversample as well: "
            "set buffer.oversample to 0, or buffer.stale_policy to drop"
        )


def _stages(config: RunConfig) -> Iterator[str]:
    stages = config.buffer.stages
    for stage in sorted(set(stages)):
        if stages.count(stage) > 1:
            yield f"buffer.stages has {stage} twice"
        if not config.scorer.processes(stage):
            yield (
                f"buffer.stages has {stage}, but scorer.count.{stage} = 0: nothing would ever "
                "leave that stage"
            )


def _sessions(config: RunConfig) -> Iterator[str]:
    sessions, slots = config.generator.sessions, config.generator.slots
    if 0 < sessions < slots:
        yield (
            f"generator.sessions = {sessions} leaves some of generator.slots = {slots} empty: "
            "raise it, or set it to 0"
        )


def _sampling(config: RunConfig) -> Iterator[str]:
    if config.generator.engine != "vllm":
        return
    found = {
        one.sampling_key("temperature"): config.sampling_for(one).temperature
        for one in config.all_environments
    }
    for key, temperature in found.items():
        if temperature < VLLM_COOLEST:
            yield (
                f"{key} = {temperature:g} is out of range: vLLM, which would raise it, takes "
                f"{VLLM_COOLEST} or more"
            )


def _memory(trainer: TrainerConfig) -> Iterator[str]:
    offloads = trainer.offload in ("optimizer", "all")
    if trainer.weights == "bf16" and trainer.precision in ("no", "fp16"):
        yield (
            f"trainer.weights = bf16 needs trainer.precision = bf16, which is {trainer.precision}: "
            "change one of them"
        )
    if offloads and trainer.precision == "fp16":
        yield "trainer.offload moves no optimizer with trainer.precision = fp16: use bf16"
    if trainer.offload in ("activations", "all") and trainer.activation_checkpointing is False:
        yield (
            f"trainer.offload = {trainer.offload} moves what recomputed layers keep: set "
            "trainer.activation_checkpointing = true"
        )


def _sequence_parallel(config: RunConfig) -> Iterator[str]:
    trainer, shared = config.trainer, config.trainer.sequence_parallel
    if shared == 1:
        return
    if trainer.nodes == 1 and trainer.ranks % shared:
        yield (
            f"trainer.sequence_parallel = {shared} does not divide trainer.ranks = "
            f"{trainer.ranks}: set trainer.ranks to a multiple of it"
        )
    if trainer.router_aux_loss_coef:
        yield (
            "trainer.router_aux_loss_coef balances the experts over the tokens that a rank has of "
            "rows, which are others with trainer.sequence_parallel: use one of them"
        )
    if trainer.compile:
        yield (
            "trainer.compile cannot compile the exchanges of trainer.sequence_parallel: use one of "
            "them"
        )


def _hosts(trainer: TrainerConfig) -> Iterator[str]:
    ranks, nodes, replicas = trainer.ranks, trainer.nodes, trainer.replicas
    if ranks % nodes:
        yield (
            f"trainer.nodes = {nodes} does not divide trainer.ranks = {ranks}, which are those of "
            "all hosts: set trainer.ranks to a multiple of it"
        )
    for key in ("sequence_parallel", "expert_parallel") if nodes > 1 and not ranks % nodes else ():
        if (ranks // nodes) % getattr(trainer, key):
            yield (
                f"trainer.{key} = {getattr(trainer, key)} does not divide the {ranks // nodes} "
                "ranks of each host (trainer.ranks / trainer.nodes), and ranks that share rows or "
                "divide experts have to be on one: change one of them"
            )
    if ranks % replicas:
        yield (
            f"trainer.replicas = {replicas} does not divide trainer.ranks = {ranks}: change one of "
            "them"
        )
    if replicas > 1 and trainer.expert_parallel > 1:
        yield (
            "trainer.expert_parallel divides experts over all ranks, not within each of "
            f"trainer.replicas = {replicas}: set one of them to 1"
        )
    if trainer.rendezvous and nodes == 1:
        yield (
            f"trainer.rendezvous = {trainer.rendezvous} has no effect with one host: set "
            "trainer.nodes, or remove it"
        )


def _expert_parallel(trainer: TrainerConfig) -> Iterator[str]:
    divided = trainer.expert_parallel
    if divided == 1:
        return
    if trainer.ranks % divided:
        yield (
            f"trainer.expert_parallel = {divided} does not divide trainer.ranks = "
            f"{trainer.ranks}: set trainer.ranks to a multiple of it"
        )
    if trainer.compile:
        yield (
            "trainer.compile cannot compile the exchanges of trainer.expert_parallel: use one of "
            "them"
        )
    if trainer.lora_rank and not trainer.lora_targets:
        yield (
            "trainer.expert_parallel does not divide adapters of experts, which an empty "
            "trainer.lora_targets means too: name other layers there, as q_proj and v_proj"
        )
