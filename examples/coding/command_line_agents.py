"""Coding agents of the command line as agents of a run: Codex, Claude Code, mini-swe-agent, aider.

Each is started as it is, in a new folder, and told where to ask for its model. A row has the task
(`prompt`) and a command that succeeds in the folder if it is done (`check`):

    {"prompt": "Write hello into made.txt.", "check": "grep -qx hello made.txt"}

    [environment]
    kind = "agent"
    agent = "command_line_agents:codex"
    branches = "train"       # they compact their history, and some ask a second model beside
    timeout_s = 600.0
    memory_mb = 0            # Node reserves more address space than it uses

They run what the model writes, as the user that they are started by: have them in a container
(`umbra run-agents` in one, on machines of its own).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

Row = dict[str, Any]
CODEX = """
model = "policy"
model_provider = "umbra"

[model_providers.umbra]
name = "Umbra"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
AIDER = """
model: openai/policy
edit-format: whole
yes-always: true
git: false
map-tokens: 0
max-chat-history-tokens: 1000000
analytics: false
check-update: false
show-release-notes: false
show-model-warnings: false
detect-urls: false
chat-history-file: {home}/chat.md
input-history-file: {home}/input
"""
# Otherwise it adds a reminder to the newest message and takes it out again one turn later.
AIDER_MODEL = "[{name: openai/policy, edit_format: whole, reminder: none}]"


def codex(row: Row, endpoint: dict[str, str], program: str = "codex") -> float:
    """OpenAI's Codex (`npm install @openai/codex`), which asks at `/v1/responses`."""
    with tempfile.TemporaryDirectory() as home:
        settings = Path(home, "config.toml")
        settings.write_text(CODEX.format(**endpoint), encoding="utf-8")
        free = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return work(row, [program, "exec", *free, row["prompt"]], home, CODEX_HOME=home)


def claude_code(row: Row, endpoint: dict[str, str], program: str = "claude") -> float:
    """Claude Code (`npm install @anthropic-ai/claude-code`), which asks at `/v1/messages`."""
    del endpoint  # it is in ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
    with tempfile.TemporaryDirectory() as home:
        command = [program, "-p", row["prompt"], "--allowedTools", "Bash", "Read", "Edit", "Write"]
        names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
        told = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", **dict.fromkeys(names, "policy")}
        return work(row, command, home, **told)


def mini_swe_agent(row: Row, endpoint: dict[str, str], program: str = "mini") -> float:
    """mini-swe-agent (`pip install mini-swe-agent`), which asks at `/v1/chat/completions`."""
    del endpoint  # it is in OPENAI_BASE_URL and OPENAI_API_KEY
    with tempfile.TemporaryDirectory() as home:
        free = ["--yolo", "--exit-immediately", "--cost-limit", "0", "-o", f"{home}/log.json"]
        command = [program, "--model", "openai/policy", *free, "--task", row["prompt"]]
        told = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
        return work(row, command, home, **told, MSWEA_GLOBAL_CONFIG_DIR=home)


def aider(row: Row, endpoint: dict[str, str], program: str = "aider") -> float:
    """aider (`pip install aider-chat`), which asks at `/v1/chat/completions`, for one task."""
    del endpoint  # it is in OPENAI_BASE_URL and OPENAI_API_KEY
    with tempfile.TemporaryDirectory() as home:
        files = {
            ".aider.conf.yml": AIDER.format(home=home),
            ".aider.model.settings.yml": AIDER_MODEL,
            ".aider.model.metadata.json": '{"openai/policy": {"litellm_provider": "openai"}}',
        }
        for name, text in files.items():
            Path(home, name).write_text(text, encoding="utf-8")
        told = {"LITELLM_LOCAL_MODEL_COST_MAP": "true"}  # it fetches a list of models otherwise
        return work(row, [program, "--message", row["prompt"]], home, **told)


def work(row: Row, command: list[str], home: str, **variables: str) -> float:
    """Run an agent in a new folder; 1 if its task is done there, however the agent ended."""
    environ = {**os.environ, "HOME": home, **variables}
    with tempfile.TemporaryDirectory() as folder:
        where: dict[str, Any] = {"cwd": folder, "env": environ, "stdin": subprocess.DEVNULL}
        subprocess.run(command, check=False, stdout=2, **where)  # to the log of the generator
        done = subprocess.run(["sh", "-c", row["check"]], check=False, stdout=2, **where)
    return float(done.returncode == 0)
