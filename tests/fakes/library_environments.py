"""Environments of other libraries, as their users write them: files for a folder, unchanged."""

# TRL 1.16: public methods are the tools.
TRL = '''
class Sums:
    def reset(self, prompt, target, **kwargs):
        self.total, self.target = 0, target
        return f" up to {target}"

    def add(self, number: int) -> int:
        """
        Add a number to the sum.

        Args:
            number: Summand.

        Returns:
            The sum.
        """
        if number < 0:
            raise ValueError("no negative numbers")
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return float(self.total == self.target)


def brevity(completions, target, environments, log_metric, **kwargs):
    log_metric("turns", len(completions[0]))
    assert environments[0].target == target[0]
    return [1.0 / len(completions[0])]


def never(completions, **kwargs):
    return [None]


class Bare:
    def reset(self, **kwargs):
        return None
'''

# verifiers 0.4.0: a taskset.
VERIFIERS = """
import verifiers.v1 as vf


class EchoData(vf.TaskData):
    answer: str = ""


class EchoTask(vf.Task[EchoData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class Echo(vf.Taskset[EchoTask]):
    def load(self):
        return [
            EchoTask(EchoData(idx=n, prompt=f"say {n}", answer=str(n)), self.config.task)
            for n in range(8)
        ]


__all__ = ["Echo"]
"""

# OpenEnv 0.10.0: a server's app.
OPENENV = """
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.secret, self.steps = 0, 0

    def reset(self, seed=None, episode_id=None, secret=3, **kwargs):
        self.secret, self.steps = secret, 0
        return Hint(hint="below 10")

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        if action.number == self.secret:
            return Hint(hint="right", done=True, reward=1.0)
        hint = "higher" if action.number < self.secret else "lower"
        return Hint(hint=hint, done=self.steps == 3, reward=-0.1)

    @property
    def state(self):
        return State(step_count=self.steps)


app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=64)
"""

# An agent with the client of OpenAI.
AGENT = """
from openai import AsyncOpenAI, BadRequestError

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


async def solve(row, endpoint):
    messages = [{"role": "user", "content": row["prompt"]}]
    said = ""
    async with AsyncOpenAI(**endpoint) as client:
        for turn in range(3):
            try:
                completion = await client.chat.completions.create(
                    model="policy", messages=messages, tools=TOOLS
                )
            except BadRequestError:
                break  # the context is full
            answer = completion.choices[0].message
            said += answer.content or ""
            messages += [answer, {"role": "user", "content": f"go on {turn}"}]
    return len(messages) // 2 + 0.01 * len(set(said))
"""
