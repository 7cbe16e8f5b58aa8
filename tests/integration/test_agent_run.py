"""A whole run by `umbra up` whose samples are made by an agent with the `openai` client."""

from pathlib import Path

from fakes.whole_runs import Up

AGENT = '''
"""A loop that knows nothing of Umbra but where its endpoint is."""

from openai import AsyncOpenAI, BadRequestError

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


async def solve(row, endpoint):
    messages = [{"role": "user", "content": row["prompt"]}]
    said = ""
    async with AsyncOpenAI(**endpoint) as client:
        for turn in range(3):
            try:
                completion = await client.chat.completions.create(
                    model="policy", messages=messages, tools=TOOLS, temperature=1.0
                )
            except BadRequestError:
                break  # the context is full
            answer = completion.choices[0].message
            said += answer.content or ""
            messages += [answer, {"role": "user", "content": f"go on {turn}"}]
    return len(messages) // 2 + 0.01 * len(set(said))
'''


def test_a_run_trains_on_what_an_agent_does(project: Path, up: Up) -> None:
    (project / "tiny_agent.py").write_text(AGENT)
    run = (project / "run.toml").read_text()
    run = run.replace('kind = "reward"', 'kind = "agent"\nagent = "tiny_agent:solve"\nworkers = 1')
    run = run.replace('reward = "tiny_reward:score"\n', "")
    run = run.replace("max_tokens = 12", f"max_tokens = 24\nstop_tokens = {list('abcdefghijklmn')}")
    run = run.replace("max_context = 64", "max_context = 512")
    (project / "run.toml").write_text(run)
    process = up("run.steps=3", quiet_s=220.0)
    summary, steps = process.finish(), process.steps()
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert summary["mismatch_k3_on_policy"] < 1e-5
    assert summary["ledger"]["trained"] == 48
    assert steps[-1]["reward/mean"] > 1.5  # above 1 by the second turns
