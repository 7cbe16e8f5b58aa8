"""`umbra chat`: a conversation with a model on the terminal, or with what is piped in."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from umbra.deploy.files.run_folder import RunFolder, read_object
from umbra.deploy.files.shown import shown_command, shown_path
from umbra.proto.bounds import printable
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.services.config import RunConfig
from umbra.services.config.loader import config_of, load_config
from umbra.services.modeling.hub import is_hub_name
from umbra.services.modeling.model_directory import TOKENIZER_FILES, check_model_dir
from umbra.services.monitor.run_address import find_run

if TYPE_CHECKING:
    from umbra.services.generator.talk import Talk

CONTEXT = 8192  # tokens at most, where the model could read more
TOKENS = 1024  # of an answer, of a model that no run says more of
RESET = "/reset"


@click.command()
@click.argument("model", default="")
@click.option("--system", default="", help="A system message to begin with.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    help="Softmax temperature; 0 takes the most likely token.  [default: the run's, else 1]",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    help=f"Tokens of an answer at most.  [default: the run's, else {TOKENS}]",
)
@click.option(
    "--engine",
    type=click.Choice(["torch", "vllm"]),
    help="Inference engine.  [default: vllm with a GPU if it is installed, else torch]",
)
@click.option("--device", help="cpu, cuda, cuda:1 or auto.  [default: the run's, else auto]")
@click.option("--seed", type=int, help="Seed of the sampling.  [default: another each time]")
def command(
    model: str,
    system: str,
    temperature: float | None,
    max_tokens: int | None,
    engine: str | None,
    device: str | None,
    seed: int | None,
) -> int:
    """Talk to MODEL: a run with a trained model, a model's folder, or ORG/NAME on the hub.

    A run is given by its folder, by its id in runs/, or not at all for the newest one; its chat
    template and sampling are used. Answers come as they are generated. /reset begins a new
    conversation, Ctrl-C ends an answer, Ctrl-D the program. Lines that are piped in are answered
    one after another.
    """
    config = _changed(_settings(model), "sampling", temperature=temperature or None)
    config = _changed(config, "sampling", max_tokens=max_tokens)
    config = _changed(config, "generator", engine=engine, device=device)
    own = config.generator
    if engine is None:  # vLLM only with a GPU: it takes a minute to start
        on_gpu = own.device != "cpu" and Path("/dev/nvidiactl").exists()
        engine = "vllm" if on_gpu and find_spec("vllm") is not None else "torch"
    if engine == "torch":
        config = _changed(config, "generator", engine_args={}, tensor_parallel=1)
    config = _changed(config, "generator", engine=engine)
    from umbra.services.generator.talk import Talk  # brings torch

    name = secrets.token_hex(4) if seed is None else f"seed-{seed}"
    opened = Talk.open(config, name, greedy=temperature == 0, system=system)
    with closing(opened) as conversation:
        if sys.stdin.isatty():
            click.echo(f"{shown_path(Path(config.model.path))}: {RESET} forgets, Ctrl-D ends")
        _talk(conversation)
    return EXIT_DONE


def _settings(model: str) -> RunConfig:
    """Return how to load and ask the model that the user names.

    Raises:
        UsageError: it is neither a model nor a run with one.
    """
    if path := _as_model(model):
        config = config_of({"model": {"path": path}}, "umbra chat")
        config = _changed(config, "sampling", max_tokens=TOKENS)
    else:
        folder = RunFolder(find_run(model))
        if not (folder.model / "config.json").is_file():
            raise UsageError(
                f"run {folder.id} has no trained model yet: wait for its end, or write its newest "
                f"checkpoint as a model with `{shown_command()} export`"
            )
        config = load_config(folder.config, environ={})
        config = _changed(config, "model", path=str(folder.model), revision="")
        config = _changed(config, "trainer", lora_rank=0, router_replay=False)  # it is merged
    found = read_object(check_model_dir(config.model.path, "MODEL") / "config.json")
    limit = found.get("max_position_embeddings")  # whoever loads it says what is wrong with it
    context = min(limit, CONTEXT) if isinstance(limit, int) else CONTEXT
    return _changed(config, "generator", slots=1, max_context=context)


def _as_model(name: str) -> str:
    """Return `name` if it is a model, here or on the hub; empty if it is a run."""
    if name and any((Path(name) / file).is_file() for file in TOKENIZER_FILES):
        return str(Path(name).resolve())
    # In a folder that is here, ORG/NAME is a run that was misspelt.
    return name if is_hub_name(name) and not Path(name).parent.exists() else ""


def _changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    """Return `config` with the given values of a section."""
    given = {key: value for key, value in values.items() if value is not None}
    changed = msgspec.structs.replace(getattr(config, section), **given)
    return msgspec.structs.replace(config, **{section: changed})


def _talk(conversation: Talk) -> None:
    for text in _lines():
        if text.strip() == RESET:
            conversation.reset()
        elif text.strip():
            try:
                for piece in conversation.say(text):
                    click.echo(printable(piece), nl=False)
                click.echo()
            except ValueError as error:
                told = f"{error}: {RESET} begins a new conversation"
                if not sys.stdin.isatty():  # what is piped in cannot go on
                    raise UsageError(told) from error
                click.echo(told, err=True)
            except KeyboardInterrupt:
                click.echo(" (stopped)")


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # keys to edit a line with
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
