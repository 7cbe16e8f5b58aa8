"""Does a test fail when the code is wrong? A random sample of small changes, each tried on its own.

    python tools/mutation.py                        # all groups: hours
    python tools/mutation.py proto --sample 50      # some of one group
    python tools/mutation.py proto --again          # also those that survived before
    python tools/mutation.py --table                # what is known, for docs/quality.md

Works on a copy of the working tree. The tests of a group run once, and which of them runs which
line is taken down; then each mutant is tried against the tests that run its lines, the fastest
first, until one fails. A mutant that no test runs has survived. What was found goes to a JSON file
after every mutant: it may be stopped at any time and goes on there. `docs/quality.md` tells more.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUT = ROOT / "benchmarks" / "results" / "mutation.json"
# Loaded once, before each child is forked: importing torch takes longer than most tests.
PRELOADED = (
    "msgspec", "numpy", "rich", "safetensors.torch", "torch",
    "torch.distributed.fsdp", "torch.distributed.tensor", "transformers", "xxhash", "zmq",
)  # fmt: skip
TRACED_CALLS = 300  # of a function by a test, as tracing is slow
SLOWER = 4.0  # times as long as the tests took once a mutant may take before it counts as hung
LEAST_S = 30.0
BASE_S = 3600.0  # for the first run of a group's tests
NOT_NOTICED = ("survived", "untested")
BROKEN = 70  # exit status of a child that could not run pytest
Z = 1.96  # for intervals of 95 %


@dataclass(frozen=True)
class Group:
    """Files that belong together, and the tests that are about them; both as glob patterns."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


GROUPS = {
    "proto": Group(
        ("proto/*.py",),
        # With the options of sockets in mind also those that connect with keys: some ms each.
        ("tests/unit/test_proto_*.py", "tests/unit/test_errors.py", "tests/unit/test_keys.py",
         "tests/unit/test_service_frame.py", "tests/unit/test_manifest.py",
         "tests/unit/test_buckets.py", "tests/unit/test_nccl_logic.py",
         "tests/unit/test_buffer_ledger.py", "tests/unit/test_buffer_broker.py",
         "tests/unit/test_security_doc.py", "tests/integration/test_security.py"),
    ),
    "objectives": Group(
        ("services/trainer/objectives/*.py",),
        ("tests/unit/test_trainer_objectives.py", "tests/unit/test_objective_properties.py",
         "tests/unit/test_trainer_advantages.py", "tests/unit/test_policy_update.py",
         "tests/unit/test_trl_parity.py", "tests/unit/test_guard.py"),
    ),
    "push": Group(
        ("services/weight_hub/push*.py", "services/weight_hub/bindings.py"),
        ("tests/unit/test_push_protocol.py", "tests/unit/test_push_stateful.py",
         "tests/unit/test_simulator.py", "tests/unit/test_bindings.py"),
    ),
    "modeling": Group(
        ("services/modeling/*.py",),
        ("tests/unit/test_trainer_packing.py", "tests/unit/test_trainer_layers.py",
         "tests/unit/test_scorers.py", "tests/unit/test_rollout*.py",
         "tests/unit/test_torch_engine.py", "tests/unit/test_exactness.py",
         "tests/unit/test_trainer_policy.py", "tests/unit/test_tools.py",
         "tests/unit/test_chat_templates.py", "tests/unit/test_tool_answers.py",
         "tests/unit/test_vllm_names.py", "tests/unit/test_architectures.py",
         "tests/unit/test_images.py", "tests/unit/test_operations.py",
         "tests/unit/test_sampler.py", "tests/unit/test_weight_table.py",
         "tests/unit/test_loading.py", "tests/unit/test_chat.py",
         "tests/unit/test_policy_update.py", "tests/unit/test_trainer_objectives.py",
         "tests/unit/test_logprob_chunks.py"),
    ),
    "buffer": Group(
        ("services/buffer/**/*.py", "services/config/trajectory_rules.py",
         "proto/net/portions.py"),
        ("tests/unit/test_buffer_*.py", "tests/unit/test_log_store.py",
         "tests/unit/test_store_*.py", "tests/unit/test_power_cuts.py",
         "tests/unit/test_run_ahead.py", "tests/unit/test_sources.py",
         "tests/unit/test_committer.py", "tests/unit/test_trajectory_rules.py",
         "tests/unit/test_bindings.py", "tests/unit/test_portions.py",
         "tests/unit/test_prompt_formats.py", "tests/integration/test_addresses.py",
         "tests/integration/test_buffer_service.py"),
    ),
}  # fmt: skip


@dataclass
class Ran:
    """What the first run of a group's tests has shown: by test, seconds and lines by file."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict[str, dict[str, list[int]]])
    failed: list[str] = field(default_factory=list[str])

    def covering(self, mutant: Mutant, text: str) -> list[str]:
        """The tests that run the mutant's lines in a file that holds `text`, the fastest first.

        Of a line that is run by imports alone, all tests; of a function whose results are cached,
        and which is run by the first test that needs one, all that run anything of the file.
        """
        names = [name for name in self.lines if name not in self.failed]
        here = {name: set(self.lines[name].get(mutant.path, ())) for name in names}
        found = [name for name in names if here[name].intersection(mutant.lines)]
        around = _functions(mutant, text)
        if not found and not around:
            found = names
        if any("cache" in ast.unparse(one) for node in around for one in _decorators(node)):
            found = [name for name in names if here[name]]
        return sorted(found, key=lambda name: self.seconds[name])


def _functions(mutant: Mutant, text: str) -> list[Any]:
    """Those that the mutant is in."""
    return [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        and _first_line(node) <= mutant.line <= (node.end_lineno or 0)
    ]


def _decorators(function: Any) -> list[ast.expr]:
    return getattr(function, "decorator_list", [])


def _first_line(node: Any) -> int:
    body = node.body
    return body[0].lineno if isinstance(body, list) else body.lineno


class Tracer:
    """A pytest plugin that takes down which lines of some files each test runs."""

    def __init__(self, files: dict[str, str]) -> None:
        self.ran = Ran()
        self._files = files  # by the name that the code goes by
        self._lines: dict[str, set[int]] = {}
        self._calls: dict[CodeType, int] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Trace one test, with the fixtures that are made for it."""
        self._lines, self._calls = {}, {}
        begun = time.perf_counter()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
        self.ran.seconds[item.nodeid] = time.perf_counter() - begun
        self.ran.lines[item.nodeid] = {name: sorted(found) for name, found in self._lines.items()}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take note of tests that fail anyway, or are left out."""
        if not report.passed:
            self.ran.failed.append(report.nodeid)

    def _trace(self, frame: Any, event: str, _argument: Any) -> Any:
        code = frame.f_code
        name = self._files.get(code.co_filename)
        if name is None:
            return None
        self._calls[code] = self._calls.get(code, 0) + 1
        if self._calls[code] > TRACED_CALLS:
            return None
        seen = self._lines.setdefault(name, set())
        if self._calls[code] == TRACED_CALLS:  # as if it had run all of it: that errs on one side
            seen.update(line for _, _, line in code.co_lines() if line)

        def local(frame: Any, event: str, _argument: Any) -> Any:
            if event == "line":
                seen.add(frame.f_lineno)
            return local

        return local


class Chosen:
    """A pytest plugin that runs these tests only, in this order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the others."""
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[name] for name in self._names if name in by_name]


class Copy:
    """A copy of the working tree, in which one file at a time is changed."""

    def __init__(self, place: Path) -> None:
        self.place = place
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in filter(None, listing.stdout.split("\0")):
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).exists():
                shutil.copy2(ROOT / name, target, follow_symlinks=False)

    def python_files(self, patterns: Sequence[str]) -> list[str]:
        """The files that match, by their path in the tree."""
        found = {path for pattern in patterns for path in self.place.glob(pattern)}
        return sorted(str(path.relative_to(self.place)) for path in found)

    def read(self, name: str) -> str:
        """The text of a file."""
        return (self.place / name).read_text(encoding="utf-8")

    @contextmanager
    def changed(self, name: str, text: str) -> Iterator[None]:
        """Let the file hold `text` meanwhile."""
        path, kept = self.place / name, self.place / f"{name}.kept"
        path.rename(kept)
        path.write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            kept.replace(path)

    def run(self, work: Callable[[], int], seconds: float, log: Path) -> int | None:
        """Have a child do `work` in the copy; its exit status, or None if it took too long."""
        child = os.fork()
        if not child:
            code = BROKEN
            try:
                os.setsid()
                os.chdir(self.place)
                out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(out, 1)
                os.dup2(out, 2)
                sys.dont_write_bytecode = True
                sys.path.insert(0, str(self.place / "src"))
                os.environ["PYTHONPATH"] = str(self.place / "src")
                os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
                code = int(work())
            except BaseException:  # noqa: BLE001 - nothing of the child may go on in the parent
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                _end_group(child)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        _end_group(child)
        os.waitpid(child, 0)
        return None


def _end_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def pytest_in_process(arguments: Sequence[str], plugin: object) -> int:
    """Run pytest without what would write into the tree."""
    fixed = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu and not e2e")
    loaded = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # a plugin, by transformers
    return pytest.main([*fixed, *loaded, *arguments], plugins=[plugin])


def first_run(copy: Copy, group: Group, log: Path) -> Ran:
    """Run all tests of `group` once."""
    at = copy.place / "src" / "umbra"
    names = copy.python_files(group.files)
    files = {str(at / name): name for name in names}
    result = copy.place / "ran.json"

    def work() -> int:
        tracer = Tracer(files)
        code = pytest_in_process(copy.python_files(group.tests), tracer)
        result.write_text(json.dumps(asdict(tracer.ran)), encoding="utf-8")
        return code

    code = copy.run(work, BASE_S, log)
    if not result.exists():
        raise SystemExit(f"the tests of the group could not be run (exit {code}): see {log}")
    ran = Ran(**json.loads(result.read_text(encoding="utf-8")))
    result.unlink()
    return ran


def outcome_of(copy: Copy, mutant: Mutant, ran: Ran, log: Path) -> tuple[str, float]:
    """`killed`, `hung`, `survived` or `untested`; and how many seconds that took."""
    tests = ran.covering(mutant, copy.read(mutant.path))
    if not tests:
        return "untested", 0.0
    begun = time.monotonic()
    files = sorted({name.partition("::")[0] for name in tests})
    limit = LEAST_S + SLOWER * sum(ran.seconds[name] for name in tests)
    with copy.changed(mutant.path, mutant.apply(copy.read(mutant.path))):
        code = copy.run(lambda: pytest_in_process(["-x", *files], Chosen(tests)), limit, log)
    took = time.monotonic() - begun
    return ("hung" if code is None else "survived" if code == 0 else "killed"), took


def interval(killed: int, tried: int) -> tuple[float, float]:
    """Wilson's interval for a share, 95 %."""
    if not tried:
        return 0.0, 1.0
    share, spread = killed / tried, Z * Z / tried
    middle = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt((share * (1 - share) + spread / 4) / tried) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def summary(total: int, tried: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The score of a group."""
    killed = sum(one["outcome"] in ("killed", "hung") for one in tried)
    low, high = interval(killed, len(tried))
    return {
        "mutants": total,
        "tried": len(tried),
        "killed": killed,
        "score": round(killed / len(tried), 4) if tried else None,
        "interval_95": [round(low, 4), round(high, 4)],
    }


def table(found: dict[str, Any]) -> str:
    """What was found, as docs/quality.md has it."""
    # Not at the top, where the children would inherit it from before it was changed.
    from umbra.services.reporting.tables import markdown

    rows: list[list[str]] = []
    for name, group in sorted(found.items()):
        low, high = (100 * bound for bound in group["interval_95"])
        share, interval = f"{100 * group['score']:.0f} %", f"{low:.0f} to {high:.0f} %"
        rows.append(
            [name, *(str(group[kind]) for kind in ("mutants", "tried", "killed")), share, interval]
        )
    columns = ["group", "mutants", "tried", "noticed", "share", "95 % interval"]
    lines = [markdown(columns, rows)]
    for name in sorted(found):
        kept = [row for row in found[name]["of"] if row["outcome"] in NOT_NOTICED]
        lines += ["", f"Not noticed in {name}: {len(kept)}", ""]
        lines += [f"- `{row['mutant']}`" for row in kept]
    return "\n".join(lines)


def names_of(every: Sequence[Mutant]) -> list[str]:
    """A name for each that an edit elsewhere in its file does not change."""
    count: Counter[str] = Counter()
    names: list[str] = []
    for mutant in every:
        name = f"{mutant.path}: {mutant.what}"
        count[name] += 1
        names.append(name if count[name] == 1 else f"{name} ({count[name]})")
    return names


def in_random_order(seed: int) -> Callable[[tuple[str, Mutant]], bytes]:
    """A key to sort names by: the same order for the same seed, whatever else there is."""
    return lambda pair: hashlib.sha256(f"{seed} {pair[0]}".encode()).digest()


def try_group(name: str, copy: Copy, options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Try a sample of the mutants of a group; keep what was found as it is found."""
    group = GROUPS[name]
    log = Path(options.log or copy.place / "pytest.log")
    ran = first_run(copy, group, log)
    print(f"{name}: {len(ran.seconds)} tests, {len(ran.failed)} of them fail anyway", flush=True)
    every = [m for path in copy.python_files(group.files) for m in mutants(path, copy.read(path))]
    by_name = dict(
        sorted(zip(names_of(every), every, strict=True), key=in_random_order(options.seed))
    )
    chosen = list(by_name.items())[: options.sample]
    known = {row["mutant"]: row for row in found.get(name, {}).get("of", [])}
    for mutant_name, mutant in chosen:
        row = known.get(mutant_name)
        if row is not None and not (options.again and row["outcome"] in NOT_NOTICED):
            continue
        outcome, seconds = outcome_of(copy, mutant, ran, log)
        print(f"{name}: {outcome}, {mutant_name}", flush=True)
        known[mutant_name] = {
            "mutant": mutant_name,
            "line": mutant.line,
            "outcome": outcome,
            "seconds": round(seconds, 1),
        }
        tried = [known[one] for one, _ in chosen if one in known]
        found[name] = {
            "seed": options.seed,
            **summary(len(every), tried),
            "failing_tests": ran.failed,
            "of": tried,
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{name}: {found[name]['score']} {found[name]['interval_95']}", flush=True)


def main() -> int:
    """Try the groups that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="*", default=[], metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--sample", type=int, default=150, help="mutants of each group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--log", help="what pytest printed for the last mutant")
    parser.add_argument("--again", action="store_true", help="also those of --out that survived")
    parser.add_argument("--table", action="store_true", help="print what --out holds")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.out.read_text(encoding="utf-8"))))
        return 0
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"there is no group {', '.join(sorted(unknown))}")
    options.out = options.out.resolve()
    os.environ["OMP_NUM_THREADS"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in PRELOADED:
            with suppress(ImportError):
                importlib.import_module(module)
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="umbra-mutation-") as folder:
        copy = Copy(Path(folder).resolve())
        for name in options.groups or GROUPS:
            try_group(name, copy, options, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
