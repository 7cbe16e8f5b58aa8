"""As much of verifiers and OpenEnv as our programs call, where the packages are not installed.

What they do with the packages themselves is tested by `tests/real/test_libraries.py`.
"""

from pathlib import Path

_CHAT = """
import asyncio, json, os, urllib.request


def chat(base_url, key, messages):
    body = json.dumps({"messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""

# Environments end with what their one turn says: "error", "group" and so on are for tests.
_V1 = (
    _CHAT
    + """
import contextlib, types
from types import SimpleNamespace as Thing

serving = []


class Config:
    @staticmethod
    def model_validate(tree):
        return Thing(tree=tree, taskset=Thing(task=None))


def env_config_type(taskset_id, env_id):
    return Config


def EvalClientConfig(base_url, api_key_var):
    return Thing(url=base_url, variable=api_key_var)


def ModelContext(model, client):
    return Thing(client=client)


class Data:
    def __init__(self, values):
        self.values = values

    @staticmethod
    def model_validate(values):
        return Data(values)

    def model_dump(self, mode):
        return self.values


class Task:
    def __init__(self, data, config):
        self.data = data

    @staticmethod
    def data_type():
        return Data


class Taskset:
    INFINITE = False

    @staticmethod
    def task_type():
        return Task

    def shuffle(self, seed):
        return [Task(Data({"prompt": f"say {n}", "n": n}), None) for n in range(16)]


class Environment:
    def __init__(self, config):
        self.config, self.taskset = config, Taskset()

    @contextlib.asynccontextmanager
    async def serving(self):
        serving.append(self)
        try:
            yield
        finally:
            open("served", "a").write("ended")

    async def run_episode(self, task, context):
        assert len(serving) == 1
        messages = [{"role": "user", "content": task.data.values["prompt"]}]
        key = os.environ[context.client.variable]
        said = await asyncio.to_thread(chat, context.client.url, key, messages)
        error = Thing(type="TaskError", message="no luck")
        rewards = {"right": Thing(value=0.5)}
        if said == "unscored":
            rewards["judge"] = None
        trace = Thing(
            agent=Thing(trainable=True),
            errors=[error] if said == "error" else [],
            rewards=rewards,
            reward=0.5,
            metrics={"turns": 1.0},
            is_truncated=said == "cut",
        )
        traces = [trace, trace] if said == "two" else [trace]
        return Thing(ok=said != "error", errors=[], traces=traces)


def load_environment(config):
    if config.tree["agent"]["harness"]["id"] != "null":
        raise ValueError("no such harness")
    return Environment(config)
"""
)
_OPENENV = """
class Result:
    def __init__(self, observation, reward=None, done=False):
        self.observation, self.reward, self.done = observation, reward, done


class GenericEnvClient:
    def __init__(self, base_url, message_timeout_s):
        assert base_url.startswith("http://127.0.0.1:")

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def reset(self, secret=3):
        self.secret = secret
        return Result({"hint": "below 10", "done": False})

    async def step(self, action):
        number = action.get("number")
        if not str(number).isdigit():
            raise RuntimeError("Server error: not a number (code: VALIDATION_ERROR)")
        if int(number) == 9:
            raise RuntimeError("Server error: it broke (code: EXECUTION_ERROR)")
        right = int(number) == self.secret
        return Result({"hint": "right" if right else "no"}, 1.0 if right else -0.5, right)
"""
GAME = """
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

SCHEMA = {"type": "object", "properties": {"number": {"type": "integer"}, "metadata": {}}}


async def schema(request):
    return JSONResponse({"action": SCHEMA})


def app():
    return Starlette(routes=[Route("/schema", schema)])
"""


def write_verifiers(folder: Path) -> str:
    """Put verifiers into `folder`; return the name of its taskset."""
    package = folder / "verifiers"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.4.0"\n')
    (package / "v1.py").write_text(_V1)
    return "tasks-there"


def write_openenv(folder: Path) -> None:
    """Put openenv into `folder`."""
    (folder / "openenv.py").write_text(_OPENENV)
