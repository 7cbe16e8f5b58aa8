"""Which requests of vLLM may read each other's keys and values."""

import random

from umbra.services.generator.vllm.updates import Salts


def test_a_group_shares_and_a_session_goes_on_alone_after_new_weights() -> None:
    salts = Salts()
    salts.loaded(3, keep=True)
    first = salts.of("a")
    assert first == salts.of("b") == salts.of("")
    salts.used("a", first)
    assert salts.of("a") == first, "weights are the same"
    salts.loaded(4, keep=True)
    own = salts.of("a")
    assert own not in (first, salts.of("b"), salts.of(""))
    salts.used("a", own)
    salts.loaded(5, keep=True)
    assert salts.of("a") == own, "read again once, at the first load, and never again"


def test_without_keep_and_by_a_forgotten_name_all_begin_again() -> None:
    salts = Salts()
    salts.loaded(0, keep=True)
    salts.used("a", salts.of("a"))
    salts.loaded(1, keep=True)
    own = salts.of("a")
    salts.used("a", own)
    salts.loaded(2, keep=False)
    salts.used("a", own)  # an answer that came late: its salt is of older weights
    assert salts.of("a") not in (own, salts.shared)
    salts.forget("a")
    salts.forget("never")
    assert not salts._last
    assert salts.of("a") == salts.shared


def test_nobody_reads_what_older_weights_made_of_anothers_tokens() -> None:
    """Whatever the order of loads and turns: a salt of before a load has one reader after it."""
    source = random.Random(1)
    for _ in range(200):
        salts, made = Salts(), {}  # by salt: sessions that read under it, and since which load
        salts.loaded(0, keep=True)
        running: dict[str, str] = {}
        load = 0
        for _ in range(60):
            name = f"s{source.randrange(4)}"
            match source.randrange(4):
                case 0:
                    load += 1
                    salts.loaded(load, keep=source.random() < 0.9)
                case 1 if name in running:
                    salts.used(name, running.pop(name))
                case 2 if name not in running:
                    salts.forget(name)
                    made = {
                        salt: {(who, at) for who, at in users if who != name}
                        for salt, users in made.items()
                    }
                case _ if name not in running:
                    salt = running[name] = salts.of(name)
                    older = {who for who, at in made.get(salt, set()) if at < load}
                    assert older <= {name}
                    made.setdefault(salt, set()).add((name, load))
