"""What is run, on which model and data, what protects its sockets, and what it logs."""

from __future__ import annotations

from typing import Any, Literal

from umbra.services.config.keys import Section, key


class RunSection(Section):
    """What is run, and where its results go."""

    name: str = key("run", "name of the run; part of its id", min_length=1)
    dir: str = key("runs", "folder that receives <id>/ with all results")
    steps: int = key(100, "optimizer steps to train", ge=1)
    seed: int = key(0, "seed of sampling, shuffling and initialisation")
    broker: str = key("tcp://127.0.0.1:*", "address the buffer binds; port * picks a free one")
    advertise: str = key(
        "",
        "host name or address by which others reach this process, where it is not the one that "
        "is bound (containers); empty = the bound one, or this host's name",
    )
    broker_grace_s: float = key(
        60.0, "seconds without the buffer, also at the start, until a process gives up", gt=0
    )


class ModelConfig(Section):
    """The policy."""

    path: str = key("", "Hugging Face model directory, tokenizer included, or ORG/NAME on the hub")
    revision: str = key(
        "",
        "branch, tag or commit of a model on the hub; empty = main. Where a run begins, it "
        "becomes the commit",
    )
    trust_remote_code: bool = key(
        False,
        "run the Python code that the model brings for its tokenizer; code for the model itself"
        " is never run",
    )
    checked: list[str] = key(
        [],
        "architectures (model_type) outside of docs/models.md that umbra check-model found right",
    )
    chat_template: str = key("", "file of a chat template instead of the model's own")
    chat_template_kwargs: dict[str, Any] = key(
        {}, "variables of the chat template, such as enable_thinking = false"
    )
    parser: str = key(
        "auto",
        "how reasoning and tool calls are read: auto (by the chat template's family), none, a "
        "family's name, vllm/TOOLS or vllm/TOOLS+REASONING",
        min_length=1,
    )

    @property
    def name(self) -> str:
        """What all take that load it: the directory, or ORG/NAME[@REVISION]."""
        return f"{self.path}@{self.revision}" if self.revision else self.path


class DataConfig(Section):
    """Prompts."""

    prompts: str | dict[str, float] = key(
        "",
        'JSONL or Parquet file, "datasets:NAME[:CONFIG][:SPLIT]" (Hugging Face), or '
        '"module:function", which returns an iterable of rows; every row has a "prompt". Or '
        "several of these, each with its weight",
    )
    columns: dict[str, str] = key(
        {}, 'columns that have another name in the prompts, ours to theirs: { prompt = "question" }'
    )
    shuffle: bool = key(True, "shuffle anew in every epoch")

    @property
    def sources(self) -> dict[str, float]:
        if isinstance(self.prompts, dict):
            return self.prompts
        return {self.prompts: 1.0} if self.prompts else {}


class SecurityConfig(Section):
    """Keys of the run's processes."""

    keys: str = key(
        "",
        "folder of the run's keys, from `umbra keys`; empty = the folder keys in the run's "
        "folder (umbra up: in run.dir) if there is one",
    )
    insecure: bool = key(False, "let sockets that other machines can reach be bound without keys")


class LogConfig(Section):
    """Logging of every service."""

    level: Literal["debug", "info", "warning", "error"] = key("info", "least level")
    format: Literal["console", "json"] = key("console", "one line or one object")
    samples: int = key(
        4,
        "rollouts of each step, from the worst to the best, that are written as text to "
        "samples.jsonl in the run's folder; 0 = none",
        ge=0,
    )
