"""`umbra check`: problems of a run, its memory, and problems of this machine."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from umbra.deploy.check import machine as machines
from umbra.deploy.check.choose import for_hardware
from umbra.deploy.check.estimate import Estimate
from umbra.deploy.check.machine import GPUS, Finding, Machine, findings, refusal, this_machine
from umbra.deploy.check.model_sizes import read_sizes
from umbra.deploy.prepare import preflight
from umbra.deploy.prepare.stage import find_rows, try_aside
from umbra.deploy.run_folder import RunFolder
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.services.config import RunConfig
from umbra.services.config.loader import as_dict, given_keys, load_config, to_toml
from umbra.services.config.rules import cautions, describe_staleness, device_faults
from umbra.services.generator.checks import check_chat
from umbra.services.modeling.pretrained import import_without_torch
from umbra.services.process.files import named_run


@click.command()
@click.argument("run_file", type=click.Path(path_type=Path), required=False)
@preflight.set_option
@click.option("--gpu", metavar="KIND", help=f"Only the memory, on GPUs of: {', '.join(GPUS)}.")
@click.option("--no-code", is_flag=True, help="Run no code that RUN_FILE names.")
@click.option("--show", "showing", is_flag=True, help="Only print RUN_FILE as it is understood.")
@click.option("--json", "json_wanted", is_flag=True, help="Print one object, with all sizes.")
def command(
    run_file: Path | None,
    overrides: tuple[str, ...],
    gpu: str | None,
    no_code: bool,
    showing: bool,
    json_wanted: bool,
) -> int:
    """Report problems of a run, its memory, and problems of this machine.

    Checks keys, values, files and packages of RUN_FILE; tries its reward or environment on the
    first prompt, its devices and chat template; estimates its memory from the model's config.json;
    and looks at this machine: GPUs, memory, /dev/shm, disk, ports, keys. Without RUN_FILE only the
    machine. Starts nothing, but runs the code that RUN_FILE names, as a run would: with --no-code
    prompts, reward and environment are left out. The exit code is 2 if there is a problem.
    """
    if run_file is None:
        if showing or gpu or overrides:
            raise UsageError("--show, --gpu and --set are about a run: give RUN_FILE")
        return _finish([], list(findings()), {}, json_wanted)
    run_file = named_run(run_file)
    if run_file.is_dir():
        run_file = RunFolder.existing(run_file, extends=True).config
    if showing:
        return _show(load_config(run_file, overrides=overrides), json_wanted)
    run, tree = preflight.load_given(run_file, overrides)
    if gpu is None and not no_code:
        preflight.check_run(run, download=False)
    machine = this_machine() if gpu is None else Machine.with_gpu(gpu)
    checks, warnings, needed = list[Finding](), [*cautions(run)], None
    local = gpu is None and run.trainer.nodes == 1
    blind = machine.blind and not machines.for_cpus(run)  # which a finding says, with the reason
    if local:
        preflight.check_packages(run)
    if local and not blind and (fault := next(device_faults(run, len(machine.gpus)), "")):
        raise UsageError(fault)
    choice = for_hardware(run, given_keys(tree), machine)
    run, changes = choice.config, choice.changes
    if choice.refusal and not machine.gpus:  # else the estimate may say more
        raise UsageError(choice.refusal)
    if local and not blind and not no_code:
        messages = try_aside(
            run, preflight.search_path(run_file), model=run.generator.engine == "vllm"
        )
        if run.generator.engine != "vllm":  # whose arguments are tried with torch
            rows = find_rows(run)  # which the user's code may give
            import_without_torch()
            messages = check_chat(run, rows)
        warnings += [("prompts", text) for text in messages]
    import_without_torch()
    sizes = read_sizes(run)
    try:
        needed = Estimate(run, sizes, machine)
        checks += [refusal("memory", fault) for fault in needed.faults]
        if choice.refusal and not needed.faults:
            checks.append(refusal("devices", choice.refusal))
        checks += [replace(refusal("memory", note), level="warning") for note in needed.notes]
    except UsageError as error:
        level = "not looked at" if run.trainer.expert_parallel > 1 else "problem"
        checks.append(Finding("memory", level, str(error)))
    sums: dict[str, int] = {}
    if needed is not None:
        gpus = 1 + max(needed.loads, default=-1)
        sums = {"gpus": gpus, "shm": needed.arena.bytes, "host": needed.host}
    if gpu is None:
        checks += findings(run, **sums)
    checks += [Finding(name, "warning", text) for name, text in warnings]
    state = "has a problem, see below" if _has_problem(checks) else "good"
    lines = [f"{run_file}: {state}", *_summary(run, changes, needed)]
    extra = {"chosen": changes, "estimate": needed.as_dict() if needed else None}
    return _finish(lines, checks, extra, json_wanted)


def _has_problem(checks: list[Finding]) -> bool:
    return any(check.level == "problem" for check in checks)


def _finish(lines: list[str], checks: list[Finding], more: dict[str, Any], as_json: bool) -> int:
    problem = _has_problem(checks)
    if as_json:
        report = {"ok": not problem, "checks": [asdict(check) for check in checks], **more}
        click.echo(json.dumps(report))
    else:
        click.echo("\n".join([*lines, *([""] if lines else []), *machines.as_text(checks)]))
    return UsageError.exit_code if problem else EXIT_DONE


def _show(run: RunConfig, as_json: bool) -> int:
    """Print the run file with defaults, environment and overrides."""
    tree = as_dict(run)
    click.echo(json.dumps(tree, indent=2) + "\n" if as_json else to_toml(tree), nl=False)
    return EXIT_DONE


def _summary(run: RunConfig, changes: list[str], needed: Estimate | None) -> list[str]:
    buffer, trainer = run.buffer, run.trainer
    groups, answers = buffer.batch_groups, buffer.group_size
    pieces = ", ".join(f"{key} = {value}" for key, value in trainer.chosen.items())
    rows = {
        "model": run.model.path,
        "prompts": ", ".join(one.prompts for one in run.environments or (run.data,)),
        "batch": f"{groups} groups of {answers} = {groups * answers}",
        "objective": f"{trainer.objective}{f' with {pieces}' if pieces else ''}",
        "staleness": (
            f"{describe_staleness(run)} (max_staleness {buffer.max_staleness}, "
            f"run_ahead {buffer.run_ahead}, minibatches {trainer.minibatches}, epochs "
            f"{trainer.epochs})"
        ),
    }
    if changes:
        rows["chosen"] = f"{', '.join(changes)} (for this machine, as the file has none)"
    if needed is not None:
        rows["memory"] = needed.in_short()
    return [f"{name + ':':10} {text}" for name, text in rows.items()]
