"""The `umbra` command: a click group whose sub-commands are imported only when they are invoked.

Nothing heavy (torch, transformers, zmq) may be imported here, so that `umbra --help` stays fast and
a machine that only runs the buffer never needs torch.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from errno import errorcode
from typing import TYPE_CHECKING, NamedTuple

import click

from umbra import __version__

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PLACE_ERRORS = "EACCES EPERM EROFS ENOENT ENOTDIR EISDIR EEXIST ENAMETOOLONG ELOOP".split()


class SubCommand(NamedTuple):
    """A sub-command's target, and the line that `umbra --help` shows for it."""

    target: str  # "module:attribute", the attribute being a click.Command
    help: str


# As `umbra --help` lists them: name, target in this package, and help.
_TABLE = """
Begin
demo        deploy.commands.demo:command                Train a tiny model on this machine's CPU.
init        deploy.commands.init:command                Write a run file and a reward to begin with.
check       deploy.check.command:command                Check a run: mistakes, and whether it fits.

Models and prompts
make-task   services.generator.command:make_task        Write the prompts of a built-in task.
make-model  services.trainer.make_model:command         Make a small random model, or convert one.
sft         services.trainer.warm_start:command         Warm-start a model on worked examples.
check-model deploy.model_check.command:command          Compare Umbra with Transformers on a model.

Run
up          deploy.run.command:up                       Start a whole run on this machine.
tinker      services.tinker.command:command             Serve the Tinker API for a model.
plan        deploy.cluster.command:command              Plan a run over several machines.
keys        deploy.cluster.command:keys                 Make the keys of a run.

Watch
monitor     services.monitor.command:monitor            Watch a run live.
status      services.monitor.command:status             Print the state of a run once.

Steer
drain       services.monitor.command:drain              End a run in order, or have a member leave.

Look back
runs        deploy.commands.runs:command                List runs, or print rollouts of one.
report      deploy.report:command                       Write a run as a page, and its timeline.
eval        services.generator.command:evaluate         Measure a model on held-out prompts.
export      services.trainer.checkpoints.folder:command Write a checkpoint as a Hugging Face model.

Services
buffer      services.buffer.command:command             Serve the buffer (the broker).
weight-hub  services.weight_hub.command:command         Push new weights to the generators.
trainer     services.trainer.command:command            Train the policy of a run.
generator   services.generator.command:command          Produce rollouts for a run.
scorer      services.scorer.service:command             Serve a scoring stage of a run.
run-agents  deploy.commands.run_agents:command          Run a run's agents on any machine.
"""


SECTIONS: dict[str, dict[str, SubCommand]] = {}
for _heading, *_lines in (text.splitlines() for text in _TABLE.strip().split("\n\n")):
    _entries = (line.split(maxsplit=2) for line in _lines)
    SECTIONS[_heading] = {n: SubCommand(f"umbra.{target}", text) for n, target, text in _entries}
COMMANDS = {name: entry for group in SECTIONS.values() for name, entry in group.items()}

# What people type for a command of another name.
OTHER_NAMES: dict[str, str] = {
    **dict.fromkeys(("train", "run", "start", "launch"), "up RUN_FILE"),
    **dict.fromkeys(("simulate", "estimate", "doctor", "validate", "config"), "check RUN_FILE"),
    **dict.fromkeys(("stop", "kill", "cancel", "pause"), "drain RUN"),
    **dict.fromkeys(("list", "ls", "samples", "rollouts"), "runs"),
    **dict.fromkeys(("logs", "watch", "top"), "monitor RUN"),
    **dict.fromkeys(("evaluate", "test"), "eval MODEL --prompts FILE"),
    **dict.fromkeys(("continue", "resume"), "up runs/ID"),
}
# Flags that people give for keys of the run file whose names are different.
OTHER_FLAGS: dict[str, str] = {
    **dict.fromkeys(("gpus", "num_gpus"), "trainer.ranks and generator.count"),
    **dict.fromkeys(("lr", "learning_rate"), "trainer.learning_rate"),
    **dict.fromkeys(("model", "data", "output_dir"), "model.path, data.prompts or run.dir"),
}

# Optional packages, by the extra of this distribution that installs them.
EXTRAS: dict[str, str] = {
    **dict.fromkeys(("torch", "transformers", "accelerate", "safetensors"), "trainer"),
    **dict.fromkeys(("math_verify", "datasets", "pyarrow"), "tasks"),
    **{name: name for name in ("vllm", "tensorboard", "wandb", "trackio", "mlflow")},
    **{"peft": "lora", "cupy": "nccl", "swanlab": "swanlab", "google": "tinker"},
}


class LazyGroup(click.Group):
    """A click group that reads names and help lines from `COMMANDS` and imports on invocation."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a sub-command; None: there is none. ModuleNotFoundError: a package is missing."""
        if (entry := COMMANDS.get(cmd_name)) is None:
            return None
        module_name, _, attribute = entry.target.partition(":")
        return getattr(importlib.import_module(module_name), attribute)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as a group does; refuse an unknown name with the nearest one."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            import difflib

            matches = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
            hint = f" Did you mean {matches[0]!r}?" if matches else ""
            if instead := OTHER_NAMES.get(name):
                hint = f" It is `umbra {instead}` here."
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return completions of `incomplete` without importing every sub-command."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        from click.shell_completion import CompletionItem

        known = [name for name in COMMANDS if name.startswith(incomplete)]
        return [CompletionItem(name, help=COMMANDS[name].help) for name in known]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sub-commands by section, without importing any of them."""
        width = max(map(len, COMMANDS))
        for section, group in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), e.help) for name, e in group.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    __version__,
    message=f"umbra %(version)s (Python {sys.version.split()[0]}, {' '.join(os.uname()[::2])})",
    help="Print the version with Python's and the platform's, and exit.",
)
def cli() -> None:
    """Post-train language models with asynchronous RL, without Ray.

    `umbra COMMAND --help` explains a command.
    """


def _report(error: Exception) -> int:
    """Print a foreseen `error` as one line and return its exit code; raise any other."""
    # Here and not above: an error is rare, and `umbra --help` should not pay for this import.
    from umbra.proto.errors import ERROR_PREFIX, UmbraError

    package = (getattr(error, "name", None) or "").partition(".")[0]
    code = errorcode.get(error.errno or 0) if isinstance(error, OSError) else None
    message, exit_code = str(error), EXIT_USAGE
    if isinstance(error, UmbraError):
        exit_code = error.exit_code
    elif isinstance(error, OSError) and error.filename and code in PLACE_ERRORS:
        message = f"{error.filename}: {error.strerror}: name another place, or mend this one"
    elif code == "ENOSPC":
        # What Python has not written yet, and cannot write, goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        message = "no space is left on the disk that is written to: free some, or use another"
        exit_code = UmbraError.exit_code
    elif isinstance(error, ModuleNotFoundError) and package in EXTRAS:
        message = f"{package} is not installed: pip install 'umbra-rl[{EXTRAS[package]}]'"
    else:
        raise error
    click.echo(f"{ERROR_PREFIX}{message}", err=True)
    return exit_code


def _key_for(error: click.NoSuchOption) -> str:
    """Return the key of the run file that an unknown flag stands for, if the command has --set."""
    if not error.ctx or not any("--set" in param.opts for param in error.ctx.command.params):
        return ""
    from umbra.services.config.loader import SECTIONS

    name = error.option_name.lstrip("-").replace("-", "_")
    keys = [f"{section}.{name}" for section, keys in SECTIONS.items() if name in keys]
    key = OTHER_FLAGS.get(name) or " or ".join(keys)
    return f"Set {key} in the run file, or by --set SECTION.KEY=VALUE." if key else ""


def _open_closed_streams() -> None:
    """Open /dev/null as each standard stream that is closed, or a file would get its number."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    A sub-command may return an int, which becomes the exit code; any other value means success.
    Errors that Umbra foresees print one line; unforeseen ones pass, for Python's traceback.
    """
    if args is None:
        _open_closed_streams()
    try:
        result = cli.main(args, prog_name="umbra", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        if isinstance(error, click.NoSuchOption) and (hint := _key_for(error)):
            click.echo(hint, err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("umbra: interrupted", err=True)
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - others than foreseen ones are raised again
        return _report(error)
    finally:
        if args is None:  # a Ctrl-C while Python tidies up ends it without a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    return result if type(result) is int else 0
