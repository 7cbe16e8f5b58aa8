"""What `umbra init` writes: a run file for a kind of machine, a reward, a few prompts."""

from __future__ import annotations

from typing import Any, Literal

import tomli_w

Machine = Literal["cpu", "gpu", "8gpu"]
MACHINES: dict[Machine, str] = {
    "cpu": "a CPU: for models of some million parameters",
    "gpu": "one GPU, which trainer and generator share",
    "8gpu": "eight GPUs: four train, four generate",
}

REWARD = '''"""What an answer is worth. The trainer sees nothing else of your task."""

from typing import Any


def score(prompt: Any, completion: str, row: dict[str, Any]) -> float:
    """The reward of one completion: 1 if it ends with the row's answer, else 0.

    Args:
        prompt: the row's "prompt", as it stands in the file.
        completion: what the model answered; may be empty.
        row: the whole line of the prompts file.
    """
    return float(completion.strip().endswith(str(row["answer"])))
'''

PROMPTS = "".join(
    f'{{"prompt": "What is {a} plus {b}? End with the number.", "answer": "{a + b}"}}\n'
    for a in range(2, 10)
    for b in range(2, 10)
)

_RUN = """\
# A run of Umbra on {machine}.
#
#   umbra check {file}     tries all of it, starts nothing
#   umbra up {file}               runs it; Ctrl-C stops it, `umbra up runs/ID` goes on
#
# docs/config.md has every key. Paths are looked up from where you are, then beside this file.

[run]
name = {name}
steps = 200                       # optimizer steps

[model]
{model}            # a directory of Hugging Face, or ORG/NAME on the hub

[data]
{prompts}       # rows with "prompt"; what else a row has reaches the reward

[environment]
{environment}
{machine_keys}"""

_EXACT = 'kind = "exact"                    # reward 1 if the response is the row\'s "answer"'
_MATH = """\
kind = "math"                     # reward 1 if the last number or formula equals the row's "answer"
                                  # (pip install 'umbra-rl[tasks]')"""
_FUNCTION = """\
kind = "reward"
reward = "reward:score"           # def score(prompt, completion, row) in reward.py here"""
REWARDS = {"function": _FUNCTION, "exact": _EXACT, "math": _MATH}

_BUFFER = """
[buffer]
group_size = 8                    # answers per prompt, which are compared with each other
batch_groups = {groups}                 # prompts per optimizer step
run_ahead = 1                     # batches that generation may be ahead of training
max_staleness = 2                 # no trained token is older than this many steps
"""

_CPU = """
[sampling]
max_tokens = 256                  # of an answer
{buffer}
[generator]
device = "cpu"
threads = 1
slots = 32                        # answers generated at once
max_context = 1024                # tokens of prompt and answer

[trainer]
device = "cpu"
threads = 1
learning_rate = 1e-5
objective = "tis_opsm"            # docs/algorithms.md has the others
"""

_ONE_GPU = """
[sampling]
max_tokens = {max_tokens}                 # of an answer
{buffer}
[generator]
engine = "{engine}"                {why}
device = "cuda:0"
slots = {slots}                        # answers generated at once
max_context = {context}                # tokens of prompt and answer
{engine_args}
[trainer]
device = "cuda:0"
learning_rate = 2e-6
objective = "tis_opsm"            # docs/algorithms.md has the others
pack_tokens = {context}                # rows as long as a context: several samples share one
micro_tokens = {context}
"""

_ENGINE_ARGS = """
[generator.engine_args]
gpu_memory_utilization = 0.45     # the rest is the trainer's; `umbra check`: does it fit?
"""

_EIGHT_GPUS = """
[sampling]
max_tokens = 6144                 # of an answer
{buffer}
[generator]
engine = "vllm"                   # pip install 'umbra-rl[vllm]'
device = "cuda:4"                 # GPUs 4 to 7
tensor_parallel = 4
slots = 256                       # answers generated at once
max_context = 8192                # tokens of prompt and answer

[trainer]
device = "cuda"                   # GPUs 0 to 3
ranks = 4
learning_rate = 1e-6
objective = "tis_opsm"            # docs/algorithms.md has the others
pack_tokens = 8192                # rows as long as a context: several samples share one
micro_tokens = 8192
rank_timeout_s = 600.0

[weight_hub]
deadline_s = 60.0                 # for a version of an 8B model, 16 GB
"""


def run_file(
    machine: Machine, *, file: str, name: str, model: str, prompts: str, reward: str, vllm: bool
) -> str:
    """The text of the run file.

    Args:
        machine: what it is for.
        file: the run file's name.
        name: of the run.
        model: `model.path`.
        prompts: `data.prompts`.
        reward: a key of `REWARDS`.
        vllm: whether vLLM is installed, which one GPU can do without.
    """
    return _RUN.format(
        machine=MACHINES[machine].partition(":")[0],
        file=file,
        name=_value(name),
        model=f"path = {_value(model)}",
        prompts=f"prompts = {_value(prompts)}",
        environment=REWARDS[reward],
        machine_keys=_machine_keys(machine, vllm),
    )


def _machine_keys(machine: Machine, vllm: bool) -> str:
    if machine == "cpu":
        return _CPU.format(buffer=_BUFFER.format(groups=8))
    if machine == "8gpu":
        return _EIGHT_GPUS.format(buffer=_BUFFER.format(groups=64))
    return _ONE_GPU.format(
        buffer=_BUFFER.format(groups=32),
        engine="vllm" if vllm else "torch",
        why="" if vllm else "# vllm is faster: pip install 'umbra-rl[vllm]'",
        max_tokens=6144 if vllm else 3072,
        slots=64 if vllm else 16,  # torch's engine takes memory for all slots at once
        context=8192 if vllm else 4096,
        engine_args=_ENGINE_ARGS if vllm else "",
    )


def _value(value: Any) -> str:
    """`value` as TOML writes it."""
    return tomli_w.dumps({"key": value}).removeprefix("key = ").strip()
