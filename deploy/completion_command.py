"""`umbra completion`: what a shell needs to complete commands and flags."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from umbra.proto.errors import EXIT_DONE, StartupError

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_UMBRA_COMPLETE"  # click's own name for it


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> int:
    """Print the completion script for SHELL.

    bash: eval "$(umbra completion bash)" in ~/.bashrc, zsh: the same in ~/.zshrc with zsh, fish:
    umbra completion fish > ~/.config/fish/completions/umbra.fish
    """
    complete = get_completion_class(shell)
    assert complete is not None
    root = click.get_current_context().find_root().command
    try:
        script = complete(root, {}, "umbra", VARIABLE).source()
    except RuntimeError as error:  # a bash that is too old, or is not there
        raise StartupError(f"no completion for {shell}: {error}") from error
    click.echo(script)
    return EXIT_DONE
