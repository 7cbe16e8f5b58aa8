"""What is run, on which model and data, what protects its sockets, and what it logs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from umbra.services.config.base import Section


class RunSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is run, and where its results go."""

    name: Annotated[str, Meta(description="name of the run; part of its id", min_length=1)] = "run"
    dir: Annotated[str, Meta(description="folder that receives <id>/ with all results")] = "runs"
    steps: Annotated[int, Meta(description="optimizer steps to train", ge=1)] = 100
    seed: Annotated[int, Meta(description="seed of sampling, shuffling and initialisation")] = 0
    broker: Annotated[
        str, Meta(description="address the buffer binds; port * picks a free one")
    ] = "tcp://127.0.0.1:*"
    broker_grace_s: Annotated[
        float,
        Meta(
            description="seconds without the buffer, also at the start, until a process gives up",
            gt=0,
        ),
    ] = 60.0
    stop_s: Annotated[
        float,
        Meta(
            description="seconds that processes get to stop in order until they are killed; "
            "at the end of a run they get twice as long to leave by themselves",
            gt=0,
        ),
    ] = 15.0


class ModelConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy."""

    path: Annotated[
        str,
        Meta(
            description="Hugging Face model directory, tokenizer included, or ORG/NAME on the hub"
        ),
    ] = ""
    revision: Annotated[
        str,
        Meta(
            description="branch, tag or commit of a model on the hub; empty = main. Where a run "
            "begins, it becomes the commit"
        ),
    ] = ""
    trust_remote_code: Annotated[
        bool,
        Meta(
            description="run the Python code that the model brings for its tokenizer; code for "
            "the model itself is never run"
        ),
    ] = False
    checked: Annotated[
        list[str],
        Meta(
            description="architectures (model_type) outside of docs/models.md that umbra "
            "check-model found right"
        ),
    ] = []
    chat_template: Annotated[
        str, Meta(description="file of a chat template instead of the model's own")
    ] = ""
    chat_template_kwargs: Annotated[
        dict[str, Any],
        Meta(description="variables of the chat template, such as enable_thinking = false"),
    ] = {}
    dialect: Annotated[
        str,
        Meta(
            description="how reasoning and tool calls are read: auto (found from the chat "
            "template), none, trl/NAME, vllm/TOOLS, vllm/TOOLS+REASONING or a .json file with a "
            "response template of Transformers",
            min_length=1,
        ),
    ] = "auto"

    @property
    def name(self) -> str:
        """What all take that load it: the directory, or ORG/NAME[@REVISION]."""
        return f"{self.path}@{self.revision}" if self.revision else self.path


class DataConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts."""

    prompts: Annotated[
        str,
        Meta(
            description="JSONL or Parquet file, a URL of one, or "
            '"datasets:NAME[:CONFIG][:SPLIT]" (Hugging Face); every row has a "prompt"'
        ),
    ] = ""
    columns: Annotated[
        dict[str, str],
        Meta(
            description="columns that have another name in the prompts, ours to theirs: "
            '{ prompt = "question" }'
        ),
    ] = {}
    sources: Annotated[
        dict[str, float],
        Meta(description="several sources instead of data.prompts, each with its weight"),
    ] = {}
    shuffle: Annotated[bool, Meta(description="shuffle anew in every epoch")] = True
    curriculum: Annotated[
        str,
        Meta(
            description='"module:function" that is called with (rows, epoch, stats) and returns '
            "the indices of the rows to draw in that epoch, in order; instead of data.shuffle"
        ),
    ] = ""
    environment_weights: Annotated[
        str,
        Meta(
            description='how the weights of [[environments]] change: "fixed", "learnable" (times '
            "the share of an environment's groups of late whose rewards differ, at least 0.1) or "
            '"module:function", called with what came of each, by name, and returning factors'
        ),
    ] = "fixed"


class SecurityConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the run's processes."""

    keys: Annotated[
        str,
        Meta(
            description="folder of the run's keys, from `umbra keys`; empty = the folder keys in "
            "the run's folder (umbra up: in run.dir) if there is one"
        ),
    ] = ""
    insecure: Annotated[
        bool, Meta(description="let sockets that other machines can reach be bound without keys")
    ] = False
    encrypt_weights: Annotated[
        bool,
        Meta(
            description="with keys: encrypt weights on their way over plane tcp; false = only "
            "authenticate them, which costs less. All else is encrypted always"
        ),
    ] = True


class LogConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logging of every service."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least level")
    ] = "info"
    format: Annotated[Literal["console", "json"], Meta(description="one line or one object")] = (
        "console"
    )
    traced_share: Annotated[
        float,
        Meta(description="share of all groups whose lives are traced; 0 = none", ge=0, le=1),
    ] = 0.0
    samples: Annotated[
        int,
        Meta(
            description="rollouts of each step, from the worst to the best, that are written as "
            "text to samples.jsonl in the run's folder; 0 = none",
            ge=0,
        ),
    ] = 4
