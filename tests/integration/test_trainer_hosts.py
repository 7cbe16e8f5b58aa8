"""A trainer of two ranks on each of two hosts, against the same in one process (FSDP2, gloo).

The hosts are told apart by what a launcher says, and by folders for their checkpoints.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.rank_bench import learn, train
from fakes.rank_processes import on_ranks
from integration.test_trainer_ranks import CASES, assert_as_alone
from safetensors.torch import load_file

from umbra.proto.errors import UsageError
from umbra.proto.records import Trajectory
from umbra.services.trainer.checkpoints.folder import export_checkpoint, read_index

STEPS, SAVED = 3, 2
ADAM = CASES["adamw"]
LEARNED = ("lora", "critic")
HERE, SWAPPED, ONE_LOST = [0, 1], [1, 0], [0, 9]
Hosts = tuple[Path, list[dict[str, Any]]]  # the folder of checkpoints, what each rank learned


@pytest.fixture(scope="module")
def trained(
    directory: Path, batches: list[list[Trajectory]], tmp_path_factory: pytest.TempPathFactory
) -> Hosts:
    folder = tmp_path_factory.mktemp("hosts")
    # The checkpoint of one rank, as host 0 has it.
    train(directory, batches, checkpoints=folder / "one-0", until=SAVED, **ADAM)

    def saved(name: str, hosts: list[int], **more: Any) -> dict[str, Any]:
        return {**ADAM, "checkpoints": [folder / f"{name}-{host}" for host in hosts], **more}

    cases = {
        **{name: CASES[name] for name in LEARNED},
        "adamw": ADAM,
        "half": saved("c", HERE, until=SAVED),
        "half_swapped": saved("d", HERE, until=SAVED),
        "half_lost": saved("e", HERE, until=SAVED),
        "half_merged": saved("f", HERE, until=SAVED),
        "again": saved("c", HERE),
        "swapped": saved("d", SWAPPED),
        "of_one": saved("one", ONE_LOST),
        "lost": saved("e", ONE_LOST),
    }
    return folder, on_ranks(folder, 4, learn, directory, batches, cases, hosts=2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [*LEARNED, "adamw"])
def test_hosts_do_not_change_what_is_learned(trained: Hosts, case: str, alone: Any) -> None:
    assert_as_alone([one[case] for one in trained[1]], alone(case))


def test_each_host_needs_the_files_of_its_ranks_alone(trained: Hosts) -> None:
    for host, part in enumerate((".", "node-1")):
        root = trained[0] / f"f-{host}"
        step = root / part / f"step-{SAVED}"
        names = {path.relative_to(root).as_posix() for path in root.rglob("*.rows")}
        ranks = (2 * host, 2 * host + 1)
        assert names == {(step / f"rank-0000{r}.rows").relative_to(root).as_posix() for r in ranks}
        index = read_index(step)
        assert (len(index.files), len(index.hosts)) == (4, 2)
        assert all(file.rows for file in index.files)
    for rank in range(4):  # of a host whose files are lost, they are missed by name
        error = trained[1][rank]["lost"]
        assert "none of the checkpoints in" in error and "rank-00000" not in error
        assert all(f"rank-0000{lost}.rows of node 1 (" in error for lost in (2, 3))


@pytest.mark.timeout(300)
def test_hosts_go_on_as_if_they_had_not_stopped(trained: Hosts, alone: Any) -> None:
    """Bit by bit from their own files; from one rank's, which the other host does not see, up to
    rounding: its rows come from the first one.
    """
    found = trained[1][0]
    for case in ("again", "swapped"):
        for name, tensor in found[case].weights.items():
            assert torch.equal(tensor, found["adamw"].weights[name]), (case, name)
    for name, tensor in found["of_one"].weights.items():
        torch.testing.assert_close(tensor, alone("adamw").weights[name], atol=2e-5, rtol=1e-3)


@pytest.mark.timeout(300)
def test_one_rank_goes_on_from_what_the_hosts_have_together(
    trained: Hosts, alone: Any, directory: Path, batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    """1. It has the folder of host 0 alone. 2. That of host 1 is copied into it."""
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(trained[0] / "f-0", checkpoints)
    missed = r"no rank-00002.rows of node 1 \("
    with pytest.raises(UsageError, match=missed):
        train(directory, batches, checkpoints=checkpoints, **ADAM)
    with pytest.raises(UsageError, match=missed):
        export_checkpoint(checkpoints / f"step-{SAVED}", tmp_path / "hf")
    shutil.copytree(trained[0] / "f-1" / "node-1", checkpoints / "node-1")
    whole = export_checkpoint(checkpoints / f"step-{SAVED}", tmp_path / "hf")
    for name, tensor in trained[1][0]["half_merged"].weights.items():
        assert torch.equal(load_file(whole / "model.safetensors")[name], tensor)
    found = train(directory, batches, checkpoints=checkpoints, **ADAM)
    assert len(found.rows) == STEPS - SAVED
    expected = alone("adamw").weights
    for name, tensor in found.weights.items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=1e-3)
