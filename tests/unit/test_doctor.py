"""`umbra doctor`: what each fact means, and the page of it. The facts are made up."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from fakes.clusters import plan_of
from fakes.ports import reserved_port
from fakes.slowness import seconds

from umbra import cli
from umbra.deploy.cluster.table import as_json as plan_as_json
from umbra.deploy.doctor import judge, machine, nodes
from umbra.deploy.doctor.diagnosis import Check, Diagnosis, as_text, examine, exit_code, unmade
from umbra.deploy.doctor.judge import GIB, Gpu, GpusSeen
from umbra.proto.errors import UsageError
from umbra.proto.net.keys import make_keys

H200 = Gpu("H200", 140 * GIB, 139 * GIB)
TWO = GpusSeen("2.13.0", "12.9", "", [H200, H200], [], "", "")
NONE = GpusSeen("2.13.0+cpu", "", "this torch is built without CUDA", [], [], "no", "")
WAIT_S = seconds(20.0)


def results(*findings: Diagnosis) -> list[str]:
    return [one.result for one in findings]


def changed(facts: GpusSeen, **changes: Any) -> GpusSeen:
    import msgspec

    return msgspec.structs.replace(facts, **changes)


# -- this machine ----------------------------------------------------------------------------------


def test_packages_that_do_not_fit() -> None:
    there = {"vllm": "0.32.0", "torch": "2.12.1+cu129"}
    assert results(*judge.fit(there, {"vllm": ["torch==2.12.1", "numpy<3"]})) == ["ok"]
    (found,) = judge.fit(there, {"vllm": ["torch==2.11.0"]})
    assert found.result == "problem"
    assert found.fact == "vllm 0.32.0 needs torch==2.11.0, 2.12.1+cu129 is installed"
    assert "torch==2.11.0" in found.remedy


def test_two_cupys_share_a_folder() -> None:
    (found,) = judge.fit({"cupy-cuda12x": "14", "cupy-cuda13x": "14"}, {})
    assert (found.result, found.remedy[:36]) == ("problem", "pip uninstall cupy-cuda12x cupy-cuda")


def test_encryption() -> None:
    assert results(judge.curve(True, "27"), judge.curve(False, "27")) == ["ok", "problem"]


@pytest.mark.parametrize(
    ("version", "cuda", "result"),
    [
        ("", "12.9", "not looked at"),
        ("570.124.06", "12.9", "ok"),
        ("525.60.13", "12.1", "ok"),
        ("520.61", "12.1", "problem"),
        ("570.124.06", "13.0", "problem"),
        ("580.65.06", "13.0", "ok"),
        ("580.65.06", "", "ok"),
    ],
)
def test_driver(version: str, cuda: str, result: str) -> None:
    assert judge.driver(version, cuda).result == result


def test_gpus() -> None:
    assert results(*judge.gpus(TWO, True, 2)) == ["ok", "ok"]
    assert results(*judge.gpus(TWO, True, 3)) == ["problem", "ok"]
    assert results(*judge.gpus(changed(TWO, apart=[(0, 1)]), True, 2)) == ["ok", "warning"]
    full = changed(TWO, gpus=[H200, Gpu("H200", 140 * GIB, 20 * GIB)])
    found, _ = judge.gpus(full, True, 2)
    assert (found.result, found.remedy[-5:]) == ("warning", "GPU 1")
    assert results(*judge.gpus(NONE, False, 0)) == ["ok"]
    assert results(*judge.gpus(NONE, True, 0)) == ["problem"]  # the driver is there
    assert results(*judge.gpus(NONE, False, 1)) == ["problem"]


def test_nccl() -> None:
    assert results(*judge.nccl(NONE)) == ["not looked at"]
    assert results(*judge.nccl(TWO)) == ["ok"]
    assert results(*judge.nccl(changed(TWO, torch_nccl="no", hub_nccl="no"))) == [
        "problem",
        "warning",
    ]


@pytest.mark.parametrize(
    ("variable", "value", "result"),
    [
        ("NCCL_SOCKET_IFNAME", "", "ok"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth", "problem"),
        ("NCCL_SOCKET_IFNAME", "=eth0", "ok"),
        ("NCCL_SOCKET_IFNAME", "ib0,ens", "problem"),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok"),
        ("NCCL_SOCKET_IFNAME", "^eth", "problem"),
        ("GLOO_SOCKET_IFNAME", "eth", "problem"),
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
    ],
)
def test_interface(variable: str, value: str, result: str) -> None:
    assert judge.interface(variable, value, ["lo", "eth0"]).result == result


def test_shared_memory() -> None:
    assert judge.shared_memory(8 * GIB, 8 * GIB, 4 * GIB).result == "ok"
    full = judge.shared_memory(GIB, 8 * GIB, 4 * GIB)
    assert (full.result, full.fact) == ("problem", "1 GiB free of 8 GiB, the run needs 4 GiB")
    assert "--shm-size" in full.remedy
    assert judge.shared_memory(64 << 20, 64 << 20, None).result == "warning"


def test_memory_files_disk_and_clock() -> None:
    assert judge.host_memory(8 * GIB, 8 * GIB, 9 * GIB).result == "problem"
    assert judge.host_memory(9 * GIB, 9 * GIB, 9 * GIB).result == "ok"
    assert results(*map(judge.open_files, (512, 4096, 65_536))) == ["problem", "warning", "ok"]
    assert results(*judge.disk("/d", 50 * GIB, 1e9, 0.001)) == ["ok", "ok"]
    assert results(*judge.disk("/d", 5 * GIB, 1e7, 0.001)) == ["warning", "warning"]
    assert results(*judge.disk("/d", GIB, 1e9, 0.5)) == ["problem", "warning"]
    assert results(judge.clock(True, 0.01), judge.clock(False, 16.0)) == ["ok", "warning"]


def test_keys(tmp_path: Path) -> None:
    """As they are made; readable by all; and of another pair."""
    make_keys(tmp_path / "keys")
    check = machine.look_at_keys(tmp_path / "keys", "")
    assert check.result == "ok"
    assert "trainer" in check.fact
    (tmp_path / "keys" / "trainer.key_secret").chmod(0o644)
    found = machine.look_at_keys(tmp_path / "keys", "")
    assert found.result == "problem"
    assert "open it to every user" in found.fact
    assert found.remedy == f"chmod 600 {tmp_path}/keys/trainer.key_secret"
    assert machine.look_at_keys(None, "").result == "ok"
    assert machine.look_at_keys(None, "tcp://10.0.0.1:5555").result == "warning"
    assert machine.look_at_keys(tmp_path / "none", "").result == "problem"


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        found = machine.look_at_ports(["tcp://127.0.0.1:*", taken])
    assert results(*found) == ["problem"]
    assert "in use by another process" in found[0].fact
    assert results(*machine.look_at_ports(["tcp://127.0.0.1:0"])) == ["ok"]


def test_a_disk_is_measured_where_the_folder_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "WRITTEN", 1)
    found = machine.look_at_disk(tmp_path / "runs" / "new")
    assert [one.check for one in found] == ["disk space", "disk speed"]
    assert found[0].fact.endswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# -- the page --------------------------------------------------------------------------------------


def test_checks_run_side_by_side_and_none_holds_up_the_page() -> None:
    """Each waits for the other; one never answers, one breaks, one meets an error of ours."""
    one, other, never = threading.Event(), threading.Event(), threading.Event()

    def meet(mine: threading.Event, theirs: threading.Event) -> Diagnosis:
        mine.set()
        return Diagnosis("meet", "ok" if theirs.wait(WAIT_S) else "problem", "")

    def hang() -> Diagnosis:
        never.wait(WAIT_S)
        return Diagnosis("hang", "ok", "")

    def refuse() -> Diagnosis:
        raise UsageError("no such file")

    def broken() -> Diagnosis:
        raise KeyError("x")

    found = examine(
        [
            Check("a", lambda: meet(one, other), WAIT_S),
            Check("b", lambda: meet(other, one), WAIT_S),
            Check("hang", hang, 0.05),
            Check("refuse", refuse, WAIT_S),
            Check("broken", broken, WAIT_S),
        ]
    )
    never.set()
    assert results(*found) == ["ok", "ok", *["not looked at"] * 3]
    assert [one.fact for one in found[2:]] == [
        "no answer within 0.05 s", "no such file", "the check itself failed: KeyError: 'x'",
    ]  # fmt: skip


def test_the_page_says_what_to_do_and_the_exit_code_is_of_problems() -> None:
    fine = [
        Diagnosis("a", "ok", "1"),
        unmade("b", "no GPU"),
        Diagnosis("c", "warning", "2", "do that"),
    ]
    assert exit_code(fine) == 0
    assert as_text(fine)[-2:] == ["What to do:", "- c: do that"]
    bad = [*fine, Diagnosis("d", "problem", "3", "do this first")]
    assert exit_code(bad) == 1
    assert as_text(bad)[-2:] == ["- d: do this first", "- c: do that"]
    assert as_text(fine[:1])[-1] == "Nothing to do."


@pytest.mark.parametrize(
    "words",
    [
        ["--listen"], ["--node", "a"], ["--plan", "p", "run.toml"], ["--plan", "p", "--for", "3"],
        ["--plan", "nowhere"], ["nowhere.toml"],
    ],
)  # fmt: skip
def test_misuse(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == 2
    assert capsys.readouterr().err.startswith("umbra: error: ")


def test_a_run_on_a_machine_with_a_full_dev_shm_and_wrong_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command as a whole; what loads torch is answered for."""
    answers = {
        "umbra.deploy.doctor.probe": b'{"torch":"2.13.0+cpu","cuda":"","why_not":"no CUDA",'
        b'"gpus":[],"apart":[],"torch_nccl":"","hub_nccl":""}',
        "umbra": json.dumps(
            {"shm_bytes": 4 * GIB, "host_bytes": 1, "gpus": {}, "faults": ["too large: buy more"]}
        ).encode(),
    }
    monkeypatch.setattr(machine, "_program", lambda *argv: answers[argv[1]])
    monkeypatch.setattr(machine, "shared_memory", lambda: (GIB, 8 * GIB))
    make_keys(tmp_path / "keys")
    (tmp_path / "keys" / "buffer.key_secret").chmod(0o640)
    run = tmp_path / "run.toml"
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        run.write_text(
            f'[run]\ndir = "{tmp_path}"\nbroker = "{taken}"\n[model]\npath = "nowhere"\n'
            f'[security]\nkeys = "{tmp_path}/keys"\n',
            encoding="utf-8",
        )
        code = cli.main(["doctor", str(run), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (code, told["ok"]) == (1, False)
    problems = {one["check"]: one["fact"] for one in told["checks"] if one["result"] == "problem"}
    assert problems.keys() >= {"/dev/shm", "estimate", "run file", "port", "keys"}
    assert problems["/dev/shm"] == "1 GiB free of 8 GiB, the run needs 4 GiB"
    assert taken in problems["port"]
    assert all(one["remedy"] for one in told["checks"] if one["result"] == "problem")


# -- between nodes ---------------------------------------------------------------------------------


def plan_json(*gpus: int, **settings: Any) -> dict[str, Any]:
    return plan_as_json(plan_of(*gpus, **settings))


def reached(plan: dict[str, Any], here: str) -> set[tuple[str, str, int]]:
    return {(t.node, t.what, t.port) for t in nodes.targets(plan, here)}


def test_what_a_node_has_to_reach() -> None:
    """A trainer of two nodes, a and b, and generators on c and d; the buffer is on a."""
    plan = plan_json(2, 2, 2, 2)
    buffer = {("a", "buffer", port) for port in (5555, 5556, 5557)}
    hub = {("a", "weight-hub", port) for port in (5559, 5560, 5563)}
    ranks = "ranks (gloo, NCCL)"
    meet = {("a", "trainer", 5561), ("a", ranks, nodes.ANY_PORT)}
    assert reached(plan, "a") == {("b", ranks, nodes.ANY_PORT)}
    assert reached(plan, "b") == buffer | hub | meet
    assert reached(plan, "c") == buffer | hub | {("b", "part-b", 5562), ("b", "part-b", 5564)}


@pytest.mark.parametrize(
    ("how", "remedy"),
    [
        ("refused", "--listen` on b"),
        ("no route", "correct the address of b"),
        ("timed out", "open the port on b for a"),
        ("name not resolved", "as a number"),
        ("strange", "see that b"),
    ],
)
def test_each_way_not_to_reach_a_node_has_its_remedy(how: str, remedy: str) -> None:
    target = nodes.Target("b", "10.0.0.2", 5555, "buffer")
    found = nodes.judge_reach(target, nodes.Reached(how), "a")
    assert (found.result, found.fact) == ("problem", f"10.0.0.2:5555 (buffer): {how}")
    assert remedy in found.remedy
    assert nodes.judge_reach(target, nodes.Reached("connected"), "a").result == "ok"
    assert nodes.judge_reach(target, nodes.Reached(""), "a").result == "not looked at"


def test_ways_not_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as silent:  # where nobody listens
        port = silent.getsockname()[1]
        assert nodes.connect("127.0.0.1", port).how == "refused"
    for error, how in (
        (socket.gaierror(-2, "Name or service not known"), "name not resolved"),
        (TimeoutError(), "timed out"),
        (OSError(113, "No route to host"), "no route"),
        (OSError(101, "Network is unreachable"), "no route"),
        (OSError(22, "Invalid argument"), "Invalid argument"),
    ):

        def fail(*_address: object, raised: OSError = error, **_more: object) -> None:
            raise raised

        monkeypatch.setattr(socket, "create_connection", fail)
        assert nodes.connect("10.0.0.1", port).how == how


def greeting(time_s: float = 0.0, **versions: str) -> nodes.Greeting:
    return nodes.Greeting(1, "b", time_s, versions)


def test_clocks() -> None:
    reached = {
        "b": nodes.Reached("connected", greeting(), offset_s=0.2, error_s=0.1),
        "c": nodes.Reached("connected", greeting(), offset_s=-3.0, error_s=0.1),
        "d": nodes.Reached("connected", greeting(), offset_s=3.0, error_s=2.5),
        "e": nodes.Reached("refused"),
    }
    found = nodes.judge_clocks("a", reached)
    assert results(*found) == ["ok", "warning", "ok", "not looked at"]
    assert found[1].fact.startswith("-3.000 s from that of a")


def test_versions() -> None:
    own = {"umbra-rl": "0.1.0", "nvidia-nccl-cu12": "2.28", "torch": "2.13.0"}
    same = nodes.judge_versions("a", own, {"b": own, "c": {"umbra-rl": "0.1.0"}}, ["a", "b"])
    assert results(*same) == ["ok"]
    other = own | {"umbra-rl": "0.2.0", "nvidia-nccl-cu12": "2.27", "torch": "2.12.0"}
    found = nodes.judge_versions("a", own, {"b": other}, ["a", "b"])
    assert results(*found) == ["problem", "problem", "warning"]
    apart = nodes.judge_versions("a", own, {"b": other}, ["a"])
    assert results(*apart) == ["problem", "warning", "warning"]
    assert "0.1.0 on a, 0.2.0 on b" in found[0].fact


def test_a_listener_greets_and_says_which_ports_it_could_not_have() -> None:
    with socket.create_server(("", 0)) as other, reserved_port() as free:
        taken, port = other.getsockname()[1], free.getsockname()[1]
        with nodes.Listener("b", {"torch": "2"}, [taken, port], True) as listener:
            found = nodes.connect("127.0.0.1", port)
            assert listener.taken.keys() == {taken}
            assert found.greeting is not None
            more = nodes.connect("127.0.0.1", found.greeting.any_port)
    assert (found.how, found.greeting.node, found.greeting.versions) == (
        "connected", "b", {"torch": "2"},
    )  # fmt: skip
    assert abs(found.offset_s) <= found.error_s + 0.001
    assert more.greeting is not None


def test_a_service_of_a_run_is_reached_but_tells_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:

        def serve() -> None:
            link, _ = service.accept()
            with link:
                link.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f")  # ZeroMQ's greeting

        thread = threading.Thread(target=serve)
        thread.start()
        found = nodes.connect("127.0.0.1", service.getsockname()[1])
        thread.join(WAIT_S)
    assert found == nodes.Reached("connected")


def test_which_node_this_is() -> None:
    plan = plan_json(1, 1)
    assert nodes.own_node(plan, "", "b.example.org")["name"] == "b"
    assert nodes.own_node(plan, "a", "b")["name"] == "a"
    plan["nodes"][0]["address"] = "127.0.0.1"
    assert nodes.own_node(plan, "", "elsewhere")["name"] == "a"
    with pytest.raises(UsageError, match="--node: c is no node of the plan: name one of a, b"):
        nodes.own_node(plan, "c", "a")
