"""Versions that are an adapter alone: from the trainer's factors to a generator's logprobs."""

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from fakes.adapters import BUCKET_BYTES, config_of, publish, trained
from fakes.architectures import ARCHITECTURES
from fakes.closeness import assert_same_logprobs
from fakes.interrupted import TEMPERATURE, teacher_forced
from fakes.versions import finish, request

from umbra.proto.errors import UsageError, WireError
from umbra.services.generator.engines.opening import open_engine
from umbra.services.modeling.lora import factors
from umbra.services.modeling.model_directory import weights_checksum
from umbra.services.modeling.models import load_model
from umbra.services.modeling.weights import weight_table
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import load_policy
from umbra.services.weights.manifest import build_manifest, check_manifest

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("architecture", "rank"),
    [("", 4), ("", 64), ("qwen3-moe", 4), ("deepseek-v3", 4), ("phi3", 4), ("gpt-oss", 4)],
)
def test_logprobs_of_every_version_are_the_trainers(
    directory: Path, tmp_path: Path, architecture: str, rank: int
) -> None:
    if architecture:
        directory = ARCHITECTURES[architecture].write(tmp_path / "model")
    config = config_of(directory, f"trainer.lora_rank={rank}")
    engine = open_engine(config, "generator-0").engine
    first = Learner(load_policy(directory)[0], config.trainer, steps=1, seed=5)
    for version, learner in enumerate((first, trained(config, 1), trained(config, 2))):
        manifest, slot = publish(learner, config)
        ends = {entry.name.split(".lora_")[1] for entry in manifest.tensors}
        assert ends == {"A.weight", "B.weight"}
        engine.load(manifest, slot, version, "keep")
        engine.submit([request(i, 24, temperature=TEMPERATURE) for i in range(6)])
        moved = 0.0
        for output in finish(engine):
            logprobs = torch.tensor(output.logprobs)
            prompt = request(int(output.request_id[1:])).prompt_ids
            expected = teacher_forced(learner.model, prompt, output.token_ids)
            assert_same_logprobs(logprobs, expected, learner.model)
            old = teacher_forced(first.model, prompt, output.token_ids)
            moved = max(moved, float((old - logprobs).abs().max()))
        assert (moved > 0.05) == (version > 0), "the versions differ"
    engine.close()


def test_small_factors_are_not_rounded_away(directory: Path) -> None:
    """In bfloat16 a merged weight loses changes below half a unit of it; factors do not."""
    config = config_of(directory, "weight_hub.dtype=bfloat16")
    learner = trained(config, 1)
    with torch.no_grad():
        for name, factor in factors(learner.model).items():
            factor.mul_(0.02 if ".lora_A." in name else 0.05)
    prompt, ids = [5, 9, 14], list(range(20, 40))
    base = load_policy(directory)[0]
    moved = teacher_forced(learner.model, prompt, ids) - teacher_forced(base, prompt, ids)

    def error(how: str) -> float:
        """How far the change of logprobs that is served is from the trainer's."""
        own = config_of(directory, "weight_hub.dtype=bfloat16", f"trainer.lora_publish={how}")
        model, rounded = (load_model(directory, CPU, torch.bfloat16) for _ in range(2))
        table = weight_table(model, own)
        model.float()  # rounded weights stay so; sums with them are exact
        rounded.float()
        table.load(*publish(learner, own, "bfloat16"))
        change = teacher_forced(model, prompt, ids) - teacher_forced(rounded, prompt, ids)
        return float((change - moved).norm())

    assert error("adapter") < 0.1 * float(moved.norm())
    assert error("merged") > 3 * error("adapter")


def test_the_base_and_the_scale_belong_to_the_layout(directory: Path) -> None:
    config = config_of(directory)
    manifest, _ = publish(trained(config, 1), config)
    facts = manifest.adapter
    assert facts is not None
    assert (facts.base, facts.rank, facts.alpha) == (weights_checksum(directory), 4, 6.0)
    layout = [(entry.name, entry.dtype, entry.shape) for entry in manifest.tensors]
    assert build_manifest(layout, BUCKET_BYTES).digest != manifest.digest
    other = msgspec.structs.replace(manifest, adapter=msgspec.structs.replace(facts, base="other"))
    with pytest.raises(WireError, match="the digest is not that of the layout"):
        check_manifest(other)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("", r"for another base model than that in model\.path of this process"),
        ("lora_alpha=7", r"lora_alpha = 6, that of this process 4 and 7"),
        ("lora_targets=['q_proj']", r"unknown: .*same model\.path and trainer\.lora_targets"),
        ("lora_publish=merged", r"has trainer\.lora_publish = adapter and this process merged"),
    ],
)
def test_a_generator_with_another_base_or_adapter_is_refused(
    directory: Path, tmp_path: Path, key: str, says: str
) -> None:
    config = config_of(directory)
    manifest, _ = publish(trained(config, 1), config)
    other = config_of(directory, *[f"trainer.{key}"] if key else [])
    if not key:  # the same shapes and names; one number differs
        model = load_policy(directory)[0]
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1e-3
        shutil.copytree(directory, tmp_path / "other")
        model.save_pretrained(tmp_path / "other")
        other = config_of(tmp_path / "other")
    engine = open_engine(other, "generator-0").engine
    with pytest.raises(UsageError, match=says):
        engine.load(manifest, memoryview(b""), 0, "keep")
    assert engine.version == -1
