"""`umbra up` with `generator.count = "auto"`: another generator comes, works, and leaves again."""

from pathlib import Path

import msgspec
import pytest

from umbra.deploy import staffing, up
from umbra.deploy.live import QuietView
from umbra.deploy.run_folder import RunFolder, read_rows
from umbra.services.config.loader import load_config
from umbra.services.generator.replay_model import ReplayModel
from umbra.services.process.signals import SignalCounter

STEPS = 40
MODEL = ReplayModel(step_s=0.02, token_s=0.0, prompt_token_s=0.0, pause_s=0.0, lengths=[20.0, 20.0])

pytestmark = pytest.mark.real


class Told(QuietView):
    """What was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("gain", [0.0, 100.0], ids=["it stays", "it leaves"])
def test_one_more_generator_is_tried(
    gain: float, tiny_model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The machine may be full and the run short: its cores are said to be idle, and it is judged at
    # each look.
    monkeypatch.setattr(staffing, "IdleCores", lambda _clock: lambda: 4.0)
    monkeypatch.setattr(staffing, "GAIN", gain)
    monkeypatch.setattr(staffing, "BUSY", 0.0)
    monkeypatch.setattr(staffing, "WAITS", 0.0)
    monkeypatch.setattr(up, "Staffing", lambda: staffing.Staffing(period_s=0.0, steps=1))
    (tmp_path / "replay.json").write_bytes(msgspec.json.encode(MODEL))
    rows = [{"id": str(n), "prompt": f"{n}", "answer": "1"} for n in range(64)]
    (tmp_path / "prompts.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    keys = {
        "run.dir": tmp_path / "runs",
        "run.steps": STEPS,
        "model.path": tiny_model_dir,
        "data.prompts": tmp_path / "prompts.jsonl",
        "environment.kind": "exact",
        "sampling.max_tokens": 64,
        "buffer.batch_groups": 4,
        "buffer.group_size": 4,
        "generator.count": "auto",
        "generator.engine": "replay",
        "generator.replay": tmp_path / "replay.json",
        "generator.slots": 4,
        "generator.device": "cpu",
        "generator.threads": 1,
        "trainer.device": "cpu",
        "trainer.threads": 1,
    }
    config = load_config(None, overrides=[f"{key}={value}" for key, value in keys.items()])
    folder, view = RunFolder.create(config.run.dir, "auto"), Told()
    with SignalCounter() as interrupts:
        run = up.Up(config, folder, view=view, interrupts=interrupts, evaluate=False)
        summary = run.run()
    assert (summary["exit_code"], summary["ledger"]["balance"]) == (0, 0), summary["exit_reason"]
    changes = [line for line in view.said if "generator 2" in line]
    tried = "the trainer waits and cores are idle: generator 2 is tried"
    judged = {0.0: "generator 2 makes the run faster and stays"}
    wanted = judged.get(gain, "generator 2 brought nothing and leaves")
    assert changes[:2] == [tried, wanted], view.said
    spans = [row for row in read_rows(folder.metrics) if row["kind"] == "span"]
    assert {"generator-0", "generator-1"} <= {row["service"] for row in spans}
